const { figures, answers } = layout;
const LEVELS = [[0.1, ""], [0.7, "some"], [2.3, "more"], [5, "much"], [Infinity, "most"]];
const OPEN_AT_FIRST = 10;

const nats = (value) => value.toFixed(3);
const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 2 : 1)} %`;
const chance = (logprob) => percent(Math.exp(logprob));
const visible = (number) => {
  const [id, text] = layout.texts[number];
  return text === null || text === "" ? `‹${id}›` : text;
};
const surprise = ([logprob, , , , top]) => Math.max(0, top[0][1] - logprob);
const levelOf = (value) => LEVELS.find(([bound]) => value < bound)[1];

// The head

function drawHead() {
  $("name").textContent = layout.name;
  const facts = [
    ["Answers changed", `${figures.changed_answers} of ${figures.answers}`],
    ["Tokens changed", figures.share === null ? "not known" : `${figures.changed} of ${figures.compared} (${percent(figures.share)})`],
    ["Surprise on average", figures.mean_surprise === null ? null : figures.mean_surprise.toFixed(4)],
    ["Surprise at worst", figures.worst_surprise === null ? null : nats(figures.worst_surprise)],
    ["Shift on average", figures.mean_shift === null ? null : figures.mean_shift.toFixed(4)],
    ["Shift at worst", figures.worst_shift === null ? null : nats(figures.worst_shift)],
  ];
  $("facts").append(...facts.filter(([, value]) => value !== null).map(([name, value]) => h("div", {}, h("dt", { textContent: name }), h("dd", { textContent: value }))));
  const notes = [
    ...Object.entries(figures.left_out).map(([reason, number]) => `Left out: ${plural(number, "token")} ${reason}.`),
    ...Object.entries(figures.skipped).map(([reason, number]) => `Skipped: ${plural(number, "recording")}: ${reason}.`),
    ...Object.entries(figures.vocabulary_not_checked).map(([reason, number]) => `Vocabulary not checked: ${plural(number, "answer")}: ${reason}.`),
  ];
  $("notes").append(...notes.map((note) => h("p", { className: "note", textContent: note })));
  const names = ["below 0.1", "0.1 to 0.7", "0.7 to 2.3", "2.3 to 5", "5 and more"];
  const levels = LEVELS.map(([, level], at) => h("li", {}, h("span", { className: `token ${level}`, textContent: names[at] })));
  $("scale").append(h("li", { className: "quiet", textContent: "surprise" }), ...levels, h("li", {}, h("span", { className: "token changed", textContent: "changed" })));
}

// The answers

function drawAnswer(answer, at) {
  if (answer.skipped) return h("div", { className: "answer skipped" }, h("b", { textContent: answer.name }), h("span", { textContent: `skipped: ${answer.skipped}` }));
  const { changed, compared, tokens, worst_surprise: worst } = answer.figures;
  const summary = h(
    "summary",
    {},
    h("b", { textContent: answer.name }),
    h("span", { className: changed ? "changed" : "", textContent: `${changed} changed` }),
    h("span", { textContent: `${compared} of ${plural(tokens, "token")}` }),
    h("span", { textContent: worst === null ? "not chosen" : `worst ${nats(worst)}` }),
    answer.run_on ? h("span", { className: "verdict", textContent: `${answer.run_on.verdict}${answer.run_on.difference ? `: ${answer.run_on.difference}` : ""}` }) : null,
  );
  const details = h("details", { className: `answer${changed ? " has-changes" : ""}` }, summary);
  details.dataset.answer = at;
  details.addEventListener("toggle", () => details.open && drawTurns(details, answer));
  return details;
}

function drawTurns(details, answer) {
  if (details.childElementCount > 1) return;
  details.append(...answer.turns.map((turn, number) => drawTurn(turn, number, answer)));
  if (answer.run_on) details.append(drawRunOn(answer.run_on));
}

/** The items that a client got, beside those that it would get. */
function drawRunOn(run) {
  const drawn = (title, items) => h("div", {}, h("h2", { textContent: title }), ...items.map((item) => h("p", { className: "item" }, h("b", { textContent: item.name ? `${item.kind} ${item.name}` : item.kind }), ` ${item.text}`)));
  return h("div", { className: "run-on" }, drawn("Recorded items", run.recorded), drawn(`Items of the new engine, from token ${run.since + 1} of turn ${run.turn} on`, run.new));
}

function drawTurn(turn, number, answer) {
  const end = h("details", { className: "end" }, h("summary", { textContent: `The end of its prompt of ${plural(turn.prompt, "token")}` }), h("p", { className: "tokens", textContent: turn.end.map((text) => layout.texts[text][1] ?? "").join("") }));
  const label = answer.turns.length > 1 ? `Turn ${turn.number}` : "Tokens";
  const tokens = h("div", { className: "tokens", role: "listbox", "aria-label": `${answer.name}, ${label}` }, ...turn.tokens.map((token, at) => drawToken(turn, token, at, number)));
  if (tokens.firstElementChild) tokens.firstElementChild.tabIndex = 0;
  const reason = turn.left_out ? h("p", { className: "quiet", textContent: `Left out: ${turn.left_out}.` }) : null;
  return h("div", { className: "turn" }, answer.turns.length > 1 ? h("h2", { textContent: label }) : null, end, reason, tokens);
}

function drawToken(turn, token, at, number) {
  const [, text, , isMark] = layout.texts[turn.texts[at]];
  const classes = ["token", levelOf(surprise(token))];
  if (isMark) classes.push("mark");
  if (token[3] === 1) classes.push("changed");
  if (token[3] === null) classes.push("left-out");
  const element = h("span", { className: classes.filter(Boolean).join(" "), textContent: text === null ? visible(turn.texts[at]) : text, role: "option", "aria-selected": "false", tabIndex: -1 });
  element.dataset.turn = number;
  element.dataset.token = at;
  return element;
}

// The token that is selected

let selected = null;

function placeOf(element) {
  const answer = answers[element.closest("[data-answer]").dataset.answer];
  const turn = answer.turns[element.dataset.turn];
  return { answer, turn, at: Number(element.dataset.token) };
}

function select(element, scrolls = false) {
  if (selected) {
    selected.setAttribute("aria-selected", "false");
    selected.tabIndex = -1;
  }
  selected = element;
  for (const other of element.parentElement.querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
  element.setAttribute("aria-selected", "true");
  element.tabIndex = 0;
  element.focus({ preventScroll: true });
  element.scrollIntoView({ block: scrolls ? "center" : "nearest" });
  show(element);
}

function show(element) {
  const { turn, at } = placeOf(element);
  const [logprob, rank, recorded, changed, top] = turn.tokens[at];
  const own = turn.texts[at];
  const facts = [
    ["Rank", rank === null ? `above ${top.length}` : String(rank)],
    ["Surprise", nats(surprise(turn.tokens[at]))],
    ["Log probability", `${nats(logprob)} (${chance(logprob)})`],
    ["Recorded", recorded === null ? null : `${nats(recorded)} (${chance(recorded)})`],
    ["Shift", recorded === null ? null : nats(logprob - recorded)],
    ["Id", String(layout.texts[own][0])],
  ].filter(([, value]) => value !== null);
  const says = { 0: "The new engine makes the same choice.", 1: "The new engine chooses otherwise.", null: turn.left_out ? `Left out: ${turn.left_out}.` : "The recorded choice is not known." }[changed];
  const left = h("div", {}, h("h2", {}, `Token ${at + 1}: `, h("code", { textContent: visible(own) })), h("p", { textContent: says }), h("dl", { className: "facts" }, ...facts.map(([name, value]) => h("div", {}, h("dt", { textContent: name }), h("dd", { textContent: value })))));
  const likely = top.map(([text, value]) => {
    const bar = h("span", { className: "likelihood" });
    bar.style.width = `${100 * Math.exp(value)}%`;
    const isOwn = layout.texts[text][0] === layout.texts[own][0];
    return h("li", { className: isOwn ? "own" : "" }, h("code", { textContent: visible(text) }), h("span", { className: "track" }, bar), h("span", { className: "number", textContent: chance(value) }));
  });
  $("chosen").replaceChildren(left, h("div", {}, h("p", { textContent: "The new engine would write" }), h("ul", { className: "likely" }, ...likely)));
  $("chosen").hidden = false;
}

function move(by) {
  const all = [...selected.parentElement.children];
  const next = all[all.indexOf(selected) + by];
  if (next) select(next);
}

/** Go to the next change, or with -1 to the previous one, and open its answer. */
function jump(by) {
  const places = answers.flatMap((answer, at) => (answer.turns ?? []).flatMap((turn, number) => turn.tokens.flatMap((token, index) => (token[3] === 1 ? [[at, number, index]] : []))));
  if (!places.length) return;
  const here = selected && [Number(selected.closest("[data-answer]").dataset.answer), Number(selected.dataset.turn), Number(selected.dataset.token)];
  const order = (one, other) => one[0] - other[0] || one[1] - other[1] || one[2] - other[2];
  const ahead = here ? places.filter((place) => order(place, here) * by > 0) : places;
  const found = (by > 0 ? ahead : ahead.reverse())[0] ?? (by > 0 ? places[0] : places.at(-1));
  const details = document.querySelector(`[data-answer="${found[0]}"]`);
  details.open = true;
  drawTurns(details, answers[found[0]]);
  select(details.querySelector(`[data-turn="${found[1]}"][data-token="${found[2]}"]`), true);
}

function onlyChanged() {
  for (const element of $("answers").children) element.hidden = $("only").checked && !element.classList.contains("has-changes");
}

// Starting the page

drawHead();
$("answers").append(...answers.map(drawAnswer));
[...$("answers").querySelectorAll(".has-changes")].slice(0, OPEN_AT_FIRST).forEach((details) => {
  details.open = true;
  drawTurns(details, answers[details.dataset.answer]);
});
const tokenAt = (event) => event.target.closest?.("[data-token]");
$("answers").addEventListener("click", (event) => tokenAt(event) && select(tokenAt(event)));
$("answers").addEventListener("pointerover", (event) => tokenAt(event) && show(tokenAt(event)));
$("answers").addEventListener("focusin", (event) => tokenAt(event) && tokenAt(event) !== selected && select(tokenAt(event)));
$("only").addEventListener("change", onlyChanged);
$("before").addEventListener("click", () => jump(-1));
$("after").addEventListener("click", () => jump(1));
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "n") jump(1);
  else if (event.key === "p") jump(-1);
  else if (event.key === "d") theme.toggle();
  else if (event.key === "Escape") $("chosen").hidden = true;
  else if (selected && document.activeElement === selected && (event.key === "ArrowRight" || event.key === "ArrowLeft")) {
    event.preventDefault();
    move(event.key === "ArrowRight" ? 1 : -1);
  }
});
