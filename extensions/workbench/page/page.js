// Starting the page

drawHead();
drawTimeline();
drawLegend();
$("rows").append(...rows.map(drawRow).filter(Boolean));
drawKeys();
for (const column of Object.keys(COLUMNS)) {
  const first = $("rows").querySelector(COLUMNS[column]);
  if (first) (focused[column] = first).tabIndex = 0;
}
$("rows").addEventListener("click", (event) => {
  const element = event.target.closest("[data-token], [data-frame], [data-event], [data-row], [data-fold]");
  if (element) activate(element);
});
document.addEventListener("keydown", onKey);
$("search").addEventListener("input", () => search($("search").value));
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") nextHit(event.shiftKey ? -1 : 1);
  if (event.key === "Escape") $("search").blur();
});
$("whitespace").addEventListener("click", toggleWhitespace);
$("help").addEventListener("click", () => $("keys").showModal());
addEventListener("beforeprint", () => document.querySelectorAll("details.prompt").forEach((details) => ((details.open = true), details.drawn())));
