// Moving by keys

const COLUMNS = { tokens: ".tokens [data-token]", items: "[data-row], [data-frame]", events: "[data-event], [data-fold]" };
const focused = { tokens: null, items: null, events: null };

const columnOf = (element) => Object.keys(COLUMNS).find((column) => element?.matches?.(COLUMNS[column]));
const inColumn = (column) => [...$("rows").querySelectorAll(COLUMNS[column])].filter((element) => !element.closest("[hidden]"));

function focus(element) {
  const column = columnOf(element);
  if (!column) return element?.scrollIntoView({ block: "center" });
  if (focused[column]) focused[column].tabIndex = -1;
  focused[column] = element;
  element.tabIndex = 0;
  element.focus({ preventScroll: true });
  element.scrollIntoView({ block: "nearest" });
}

function step(by) {
  const column = columnOf(document.activeElement) ?? "tokens";
  const all = inColumn(column);
  const here = all.indexOf(document.activeElement);
  const next = here < 0 ? (focused[column] ?? all[0]) : all[Math.min(all.length - 1, Math.max(0, here + by))];
  if (next) focus(next);
}

function jump(by) {
  const column = columnOf(document.activeElement) ?? "tokens";
  const all = [...$("rows").children].filter((row) => row.querySelector(COLUMNS[column]));
  const here = all.indexOf(document.activeElement?.closest(".row"));
  const row = all[Math.min(all.length - 1, Math.max(0, here + by))];
  if (row) focus(row.querySelector(COLUMNS[column]));
}

/** Move the focus to a column: to the selected or a highlighted element in it, if there is one. */
function go(column) {
  const all = inColumn(column);
  const next = all.find((element) => element.classList.contains("chosen")) ?? all.find((element) => element.classList.contains("lit")) ?? focused[column] ?? all[0];
  if (next) focus(next);
}

function activate(element) {
  if (element.dataset.fold !== undefined) return element.toggle(element.getAttribute("aria-expanded") !== "true");
  for (const kind of ["token", "frame", "event", "row"]) {
    if (element.dataset[kind] !== undefined) return choose(kind, Number(element.dataset[kind]), true);
  }
}

const KEYS = [
  [["j", "ArrowDown", "ArrowRight"], "→ ↓ j", "next in the column", () => step(1)],
  [["k", "ArrowUp", "ArrowLeft"], "← ↑ k", "the one before", () => step(-1)],
  [["]"], "]", "next item", () => jump(1)],
  [["["], "[", "the item before", () => jump(-1)],
  [["Enter", " "], "Enter", "select, or unfold", (event) => columnOf(event.target) && activate(event.target)],
  [["1", "t"], "1", "to the tokens of what is selected", () => go("tokens")],
  [["2", "i"], "2", "to its item", () => go("items")],
  [["3", "e"], "3", "to its events", () => go("events")],
  [["/"], "/", "search; Enter goes on to the next", () => $("search").focus()],
  [["w"], "w", "show whitespace", () => toggleWhitespace()],
  [["d"], "d", "light or dark", () => theme.toggle()],
  [["Escape"], "Esc", "clear the selection", () => choose(null)],
  [["?"], "?", "these keys", () => $("keys").showModal()],
];

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input") || $("keys").open) return;
  const moved = event.target.closest("pre, summary, .bar, .link, .close") && event.key !== "Escape";
  if (moved && (event.key.startsWith("Arrow") || event.key === "Enter" || event.key === " ")) return;
  const key = KEYS.find(([names]) => names.includes(event.key));
  if (!key || (event.key === "Enter" || event.key === " ") && !columnOf(event.target)) return;
  event.preventDefault();
  key[3](event);
}

// Searching

let hits = [], hit = -1;

function search(text) {
  const wanted = text.toLowerCase();
  hits = wanted ? [...inTokens(wanted), ...inTitles(wanted), ...inTypes(wanted)] : [];
  hit = -1;
  $("found").textContent = wanted ? (hits.length ? `${hits.length.toLocaleString("en")} found` : "nothing") : "";
}

function inTokens(wanted) {
  const written = tokens.texts.map((_, token) => shown(textOf(token)).toLowerCase());
  const starts = [];
  let length = 0;
  for (const each of written) length = starts.push(length) && length + each.length;
  const all = written.join(""), found = [];
  let token = 0;
  for (let place = all.indexOf(wanted); place >= 0; place = all.indexOf(wanted, place + 1)) {
    while (token + 1 < starts.length && starts[token + 1] <= place) token += 1;
    found.push({ kind: "token", number: token });
  }
  return found;
}

const inTitles = (wanted) => rows.flatMap((row, number) => (row.kind === "item" && row.title.toLowerCase().includes(wanted) ? [{ kind: "row", number }] : []));
const inTypes = (wanted) => events.flatMap((event, number) => (event.delta === null && event.common.type.includes(wanted) ? [{ kind: "event", number }] : []));

function nextHit(by) {
  if (!hits.length) return;
  hit = (hit + by + hits.length) % hits.length;
  $("found").textContent = `${hit + 1} of ${hits.length.toLocaleString("en")}`;
  choose(hits[hit].kind, hits[hit].number);
  elementOf(hits[hit].kind, hits[hit].number)?.scrollIntoView({ block: "center" });
}

// Switches

function toggleWhitespace() {
  const on = document.body.classList.toggle("whitespace");
  $("whitespace").setAttribute("aria-pressed", String(on));
  elements.token.forEach((element, token) => (element.textContent = spelled(textOf(token))));
}

function drawKeys() {
  const list = h("dl", {}, ...KEYS.map(([, keys, text]) => h("div", {}, h("dt", {}, ...keys.split(" ").map((key) => h("kbd", { textContent: key }))), h("dd", { textContent: text }))));
  const close = h("button", { type: "button", className: "plain", textContent: "Close" });
  close.addEventListener("click", () => $("keys").close());
  $("keys").append(h("h2", { id: "keys-title", textContent: "Keys" }), list, close);
}

function drawLegend() {
  const used = new Set(tokens.channels);
  const legend = h("ul", { className: "legend", "aria-label": "Channels" });
  CHANNELS.forEach((channel, index) => used.has(String(index)) && index < 5 && legend.append(h("li", { className: channel, textContent: channel })));
  $("columns").firstElementChild.after(legend);
}
