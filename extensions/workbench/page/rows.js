// Drawing: the head

const elements = { token: [], frame: [], event: [], row: [] };

function drawHead() {
  $("name").textContent = layout.name;
  const params = Object.entries(layout.request).map(([name, value]) => `${name.replaceAll("_", " ")}: ${typeof value === "string" ? value : JSON.stringify(value)}`);
  $("request").textContent = params.join("  ·  ");
  const fact = ([name, value]) => h("div", {}, h("dt", { textContent: name }), h("dd", { textContent: value, className: name === "Status" ? `state ${value.split(" ")[0]}` : "" }));
  $("facts").append(...layout.facts.map(fact));
  $("details").lastElementChild.append(...layout.details.map(fact));
  for (const failure of layout.failures) $("notes").append(h("p", { className: "note failure", textContent: failure }));
  for (const note of layout.notes) $("notes").append(h("p", { className: "note", textContent: note }));
}

// Drawing: tokens

function tooltip(text, number) {
  const parts = [number === undefined ? "" : `token ${number}`, `id ${text[0]}`, text[2] ? `bytes ${text[2]}` : ""];
  const logprob = number === undefined ? undefined : tokens.logprobs[number];
  if (logprob) parts.push(`probability ${likelihood(logprob[0])}`);
  return parts.filter(Boolean).join(" · ");
}

const likelihood = (logprob) => `${(Math.exp(logprob) * 100).toFixed(1)} %`;

/** The text of a token as it is displayed: a line break is made visible, other whitespace on request. */
function spelled(text) {
  let written = shown(text);
  if (text[1] === "") return "◌";
  if (text[1] === null) return ` ${written}`;
  if (document.body.classList.contains("whitespace")) written = written.replaceAll(" ", "·").replaceAll("\t", "→\t");
  if (document.body.classList.contains("whitespace") || /^\s*\n\s*$/.test(written)) written = written.replaceAll("\n", "↵\n");
  return written;
}

function drawToken(number) {
  const text = textOf(number);
  const channel = CHANNELS[tokens.channels[number]];
  const rare = tokens.logprobs[number] && tokens.logprobs[number][0] < Math.log(0.5) ? " rare" : "";
  const fault = number === atFault ? " fault" : "";
  const element = h("span", {
    className: `token ${channel}${text[3] ? " mark" : ""}${rare}${fault}`, role: "option", tabIndex: -1, "aria-selected": "false", title: tooltip(text, number),
    textContent: spelled(text),
  });
  element.dataset.token = number;
  elements.token[number] = element;
  return element;
}

/** The token at which a stage raised: the last of the chunk that it read. */
const atFault = layout.fault === null ? -1 : tokens.chunks.findLastIndex((chunk) => chunk <= layout.fault);

function drawTokens(row) {
  const list = h("div", { className: "tokens", role: "listbox", "aria-label": `Tokens: ${row.title ?? "of the turn"}`, "aria-orientation": "horizontal" });
  const add = inLines(list);
  for (const number of row.tokens) {
    for (const repair of tokens.repairs[number] ?? []) add(h("span", { className: "repair", role: "presentation", textContent: repair, title: "The parser repaired this" }), "");
    add(drawToken(number), shown(textOf(number)));
    if (number === atFault) add(h("span", { className: "repair fault", role: "presentation", textContent: "ends here", title: layout.failures[0] }), "");
  }
  return list;
}

/** Return a function that appends elements to a list in lines, so that the browser lays out only visible lines. */
function inLines(list) {
  let line = null;
  return (element, text) => {
    line ??= list.appendChild(h("div", { className: "line", role: "presentation" }));
    line.append(element);
    if (text.endsWith("\n") || line.childElementCount > LONGEST_LINE) line = null;
  };
}

// Drawing: the prompt

function drawPrompt(prompt) {
  const details = h("details", { className: "prompt" });
  const messages = plural(prompt.messages.length, "message");
  details.append(h("summary", {}, h("b", { textContent: "Prompt" }), ` ${plural(prompt.count, "token")} in ${messages}`,
    prompt.known ? h("span", { className: "quiet", textContent: `, ${prompt.known} of them as before` }) : null));
  const draw = () => {
    if (details.childElementCount > 1) return;
    prompt.messages.forEach((message, index) => details.append(drawMessage(message, index < prompt.known)));
    if (prompt.grammar) details.append(h("details", { className: "message" }, h("summary", { textContent: "grammar" }), h("pre", { tabIndex: 0, textContent: prompt.grammar })));
  };
  details.addEventListener("toggle", draw);
  details.drawn = draw;
  return details;
}

function drawMessage(message, known) {
  const texts = message.map((number) => layout.texts[number]);
  const begun = texts.findIndex((text) => !text[3]), stop = texts.findIndex((text, index) => text[3] && index > begun);
  const header = begun < 0 ? "" : texts.slice(begun, stop < 0 ? undefined : stop).map(shown).join("");
  const role = header.match(/[\p{L}\d_.]+/u)?.[0] ?? "prompt";
  const body = h("p", { className: "tokens" });
  for (const text of texts) body.append(h("span", { className: text[3] ? "token markup mark" : "token", title: tooltip(text), textContent: spelled(text) }));
  const marked = texts.some((text) => text[3]);
  return h("details", { className: "message", open: !known }, h("summary", {}, h("b", { textContent: marked ? role : "prompt" }), ` ${plural(message.length, "token")}`), body);
}

// Drawing: items

function drawItem(row, index) {
  const { opened, complete, repairs = [], result, error, data, started, finished } = row;
  const closed = row.frames.at(-1);
  const [kind, ...names] = row.title.split(" · ");
  const name = names.join(" · ");
  const head = h("button", { className: "item-head", type: "button", tabIndex: -1, "aria-pressed": "false" }, h("span", { className: "kind", textContent: kind }), name ? h("span", { className: "name", textContent: name }) : null);
  head.dataset.row = index;
  elements.row[index] = elements.frame[row.frames[0]] = head;
  const article = h("article", { className: "item" }, head);
  if (opened.recipient) article.append(h("p", { className: "quiet", textContent: `to ${opened.recipient}` }));
  if (row.deltas) article.append(drawDeltas(row));
  if (started !== undefined) article.append(drawTool(started, finished, result, error, data));
  const chips = h("p", { className: "chips" });
  for (const repair of repairs) chips.append(h("span", { className: "repair", textContent: repair }));
  const state = complete === undefined ? "never closed" : complete ? "complete" : "incomplete";
  elements.frame[closed] = h("span", { className: `state ${state === "complete" ? "completed" : "incomplete"}`, textContent: state });
  chips.append(elements.frame[closed]);
  article.append(chips);
  return article;
}

function drawDeltas(row) {
  const list = h("div", { className: "text", role: "listbox", "aria-label": `Text: ${row.title}`, "aria-orientation": "horizontal" });
  const add = inLines(list);
  for (const [frame, text] of row.deltas) {
    const delta = h("span", { className: "delta", role: "option", tabIndex: -1, "aria-selected": "false", textContent: text });
    delta.dataset.frame = frame;
    elements.frame[frame] = delta;
    add(delta, text);
  }
  return list;
}

function drawTool(started, finished, result, error, data) {
  const box = h("div", { className: "tool" });
  elements.frame[started] = h("p", { className: "quiet", textContent: "the server runs it" });
  box.append(elements.frame[started]);
  if (finished === undefined) return box;
  const text = error ?? (result || (data ? JSON.stringify(data, null, 2) : "(nothing)"));
  elements.frame[finished] = h("pre", { className: error ? "failed" : "", tabIndex: 0, textContent: text });
  box.append(elements.frame[finished]);
  return box;
}

// Drawing: events

function drawEvents(row) {
  const list = h("ol", { className: "events" });
  for (const run of runs(row.events)) {
    if (run.length < FOLDED_FROM) list.append(h("li", {}, drawEvent(run[0])));
    else list.append(drawFold(run));
  }
  return list;
}

/** Group consecutive deltas of one kind; any other event is a group of its own. */
function runs(numbers) {
  const found = [];
  for (const number of numbers) {
    const event = events[number], last = found.at(-1);
    if (last && event.delta !== null && events[last[0]].delta !== null && events[last[0]].common === event.common) last.push(number);
    else found.push([number]);
  }
  return found;
}

const shortened = (type) => type.replace(/^response\./, "");
const wordsOf = (type) => shortened(type).split(/(?<=[._])/).flatMap((word) => [document.createElement("wbr"), word]);
const typeOf = ({ common }) => h("span", { className: "type", title: common.type }, ...wordsOf(common.type));

function drawEvent(number) {
  const event = events[number];
  const button = h("button", { className: "event", type: "button", tabIndex: -1, "aria-pressed": "false" }, h("span", { className: "number", textContent: event.number }), typeOf(event));
  if (event.delta !== null) button.append(h("q", { textContent: event.delta.replaceAll("\n", "↵") }));
  if (event.at !== null) button.append(h("time", { textContent: seconds(event.at) }));
  button.dataset.event = number;
  elements.event[number] = button;
  return button;
}

function drawFold(run) {
  const first = events[run[0]], last = events[run.at(-1)];
  const button = h("button", { className: "event fold", type: "button", tabIndex: -1, "aria-expanded": "false" },
    h("span", { className: "number", textContent: `${first.number}–${last.number}` }), h("b", { textContent: `${run.length.toLocaleString("en")} ×` }), typeOf(first));
  if (first.at !== null) button.append(h("time", { textContent: seconds(first.at) }));
  const item = h("li", {}, button);
  button.dataset.fold = run[0];
  button.toggle = (open) => {
    if (open && item.childElementCount === 1) item.append(h("ol", { className: "events" }, ...run.map((number) => h("li", {}, drawEvent(number)))));
    if (item.lastChild !== button) item.lastChild.hidden = !open;
    button.setAttribute("aria-expanded", String(open));
    light();
  };
  for (const number of run) elements.event[number] = button;
  return item;
}

// Drawing: rows

function drawRow(row, index) {
  const cells = [h("div", { className: "cell" }), h("div", { className: "cell" }), h("div", { className: "cell" })];
  const element = h("div", { className: `row ${row.kind} ${row.channel}`, role: "group", "aria-label": row.kind });
  if (row.kind === "turn") drawTurn(row, cells[0], element);
  if (row.kind === "item") {
    element.setAttribute("aria-label", row.title);
    cells[1].append(drawItem(row, index));
  }
  if (row.kind === "end") drawEnd(row, cells[1]);
  if (row.tokens) cells[0].append(drawTokens(row));
  if (row.events) cells[2].append(drawEvents(row));
  if (!cells.some((cell) => cell.hasChildNodes())) return null;
  element.append(...cells);
  return element;
}

function drawTurn(row, cell, element) {
  const turn = h("h3", { textContent: `Turn ${row.turn}` });
  elements.frame[row.frames?.[0]] = turn;
  element.setAttribute("aria-label", `Turn ${row.turn}`);
  cell.append(turn);
  const prompt = layout.prompts[row.turn - 1];
  if (prompt) cell.append(drawPrompt(prompt));
  else if (row.prompt_tokens) cell.append(h("p", { className: "quiet", textContent: `Prompt of ${plural(row.prompt_tokens, "token")}, which was not recorded` }));
}

function drawEnd(row, cell) {
  const { reason, output_tokens: output, reasoning_tokens: thought } = row.ended;
  const text = h("p", { className: "quiet" }, h("b", { textContent: reason.replaceAll("_", " ") }), ` after ${plural(output, "token")}${thought ? `, ${thought.toLocaleString("en")} of thought` : ""}`);
  elements.frame[row.frames[0]] = text;
  cell.append(text);
}
