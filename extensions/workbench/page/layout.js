/* The data of a page that is a file. */

const layout = JSON.parse($("layout").textContent);
