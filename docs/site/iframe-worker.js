// Browsers start no worker from a file, but one from text: this is the text of the search, which the build writes here.
// The name is the one that the generator knows for such a script.
if (location.protocol === "file:") {
  const source = "SEARCH";
  const FromAddress = window.Worker;
  window.Worker = function (_, options) {
    return new FromAddress(URL.createObjectURL(new Blob([source], { type: "text/javascript" })), options);
  };
}
