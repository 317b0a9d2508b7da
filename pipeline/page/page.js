"use strict";
// Whatever was recorded is written as text, never as markup: there is no innerHTML in this file.

const story = JSON.parse(document.getElementById("story").textContent);
const CHANNELS = ["markup", "analysis", "commentary", "final", "call", "unread"];
const FOLDED_FROM = 2;
const LONGEST_LINE = 1000;

const $ = (id) => document.getElementById(id);

/** An element with properties, attributes (those with a dash, and roles) and children. */
function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const count = (number, one) => `${number.toLocaleString("en")} ${one}${number === 1 ? "" : "s"}`;
const seconds = (at) => (at < 1 ? `${Math.round(at * 1000)} ms` : `${at.toFixed(2)} s`);

// What is known, by number

const { tokens, frames, rows } = story;
const events = story.events.told.map(([common, number, delta, cause, at]) => ({ common: story.events.common[common], number, delta, cause, at }));
const grouped = (keys) => {
  const groups = new Map();
  keys.forEach((key, index) => key !== null && (groups.get(key) ?? groups.set(key, []).get(key)).push(index));
  return groups;
};
const tokensOfChunk = grouped(tokens.chunks);
const framesOfChunk = grouped(frames.map(([, cause]) => cause));
const eventsOfFrame = grouped(events.map((event) => event.cause));
const rowOf = { token: [], frame: [], event: [] };
rows.forEach((row, index) => {
  for (const kind of Object.keys(rowOf)) for (const number of row[`${kind}s`] ?? []) rowOf[kind][number] = index;
});
const textOf = (token) => story.texts[tokens.texts[token]];
const shown = (text) => (text[1] === null ? String(text[0]) : text[1]);

/** An event as it went over the wire. */
function whole(event) {
  return event.delta === null ? event.common : { ...event.common, sequence_number: event.number, delta: event.delta };
}

// Who caused whom

const none = () => ({ token: [], frame: [], event: [], row: [] });

/** Everything that goes together with what is selected, by kind. */
function related(kind, number) {
  const set = none();
  if (kind === "row") {
    const row = rows[number];
    Object.assign(set, { token: row.tokens ?? [], frame: row.frames ?? [], event: row.events ?? [], row: [number] });
    return set;
  }
  if (kind === "token") set.frame = framesOfChunk.get(tokens.chunks[number]) ?? [];
  if (kind === "frame") set.frame = [number];
  if (kind === "event") set.frame = events[number].cause === null ? [] : [events[number].cause];
  set.event = kind === "event" ? [number] : set.frame.flatMap((frame) => eventsOfFrame.get(frame) ?? []);
  const chunks = kind === "token" ? [tokens.chunks[number]] : [...new Set(set.frame.map((frame) => frames[frame][1]))];
  set.token = chunks.flatMap((chunk) => tokensOfChunk.get(chunk) ?? []);
  const found = kind === "token" ? [rowOf.token[number]] : [];
  set.row = [...new Set([...found, ...set.frame.map((frame) => rowOf.frame[frame])])].filter((row) => row !== undefined);
  return set;
}

// Drawing: the head

const elements = { token: [], frame: [], event: [], row: [] };

function drawHead() {
  $("name").textContent = story.name;
  const asked = Object.entries(story.request).map(([name, value]) => `${name.replaceAll("_", " ")}: ${typeof value === "string" ? value : JSON.stringify(value)}`);
  $("asked").textContent = asked.join("  ·  ");
  for (const [name, value] of story.facts) {
    const state = name === "Status" ? `state ${value.split(" ")[0]}` : "";
    $("facts").append(h("div", {}, h("dt", { textContent: name }), h("dd", { textContent: value, className: state })));
  }
  if (story.failure) $("notes").append(h("p", { className: "note failure", textContent: story.failure }));
  for (const note of story.notes) $("notes").append(h("p", { className: "note", textContent: note }));
}

// Drawing: tokens

function tooltip(text, number) {
  const parts = [number === undefined ? "" : `token ${number}`, `id ${text[0]}`, text[2] ? `bytes ${text[2]}` : ""];
  const logprob = number === undefined ? undefined : tokens.logprobs[number];
  if (logprob) parts.push(`probability ${likelihood(logprob[0])}`);
  return parts.filter(Boolean).join(" · ");
}

const likelihood = (logprob) => `${(Math.exp(logprob) * 100).toFixed(1)} %`;

/** How a token is written: a line break shows, other whitespace on request. */
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
  const element = h("span", {
    className: `token ${channel}${text[3] ? " mark" : ""}${rare}`, role: "option", tabIndex: -1, "aria-selected": "false", title: tooltip(text, number),
    textContent: spelled(text),
  });
  element.dataset.token = number;
  elements.token[number] = element;
  return element;
}

function drawTokens(row) {
  const list = h("div", { className: "tokens", role: "listbox", "aria-label": `Tokens: ${row.title ?? "of the turn"}`, "aria-orientation": "horizontal" });
  const add = inLines(list);
  for (const number of row.tokens) {
    for (const repair of tokens.repairs[number] ?? []) add(h("span", { className: "repair", role: "presentation", textContent: repair, title: "The parser repaired this" }), "");
    add(drawToken(number), shown(textOf(number)));
  }
  return list;
}

/** What appends to a list line by line, so that a browser lays out only the lines that are seen. */
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
  const messages = count(prompt.messages.length, "message");
  details.append(h("summary", {}, h("b", { textContent: "Prompt" }), ` ${count(prompt.count, "token")} in ${messages}`,
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
  const texts = message.map((number) => story.texts[number]);
  const begun = texts.findIndex((text) => !text[3]), stop = texts.findIndex((text, index) => text[3] && index > begun);
  const header = begun < 0 ? "" : texts.slice(begun, stop < 0 ? undefined : stop).map(shown).join("");
  const role = header.match(/[\p{L}\d_.]+/u)?.[0] ?? "prompt";
  const body = h("p", { className: "tokens" });
  for (const text of texts) body.append(h("span", { className: text[3] ? "token markup mark" : "token", title: tooltip(text), textContent: spelled(text) }));
  const marked = texts.some((text) => text[3]);
  return h("details", { className: "message", open: !known }, h("summary", {}, h("b", { textContent: marked ? role : "prompt" }), ` ${count(message.length, "token")}`), body);
}

// Drawing: items

function drawItem(row, index) {
  const { opened, complete, repairs = [], result, error, data, started, finished } = row.told_of;
  const closed = row.frames.at(-1);
  const [kind, whom] = row.title.split(" · ", 2);
  const head = h("button", { className: "item-head", type: "button", tabIndex: -1, "aria-pressed": "false" }, h("span", { className: "kind", textContent: kind }), whom ? h("span", { className: "whom", textContent: whom }) : null);
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
  const text = error ?? (result || (data?.length ? JSON.stringify(data, null, 2) : "(nothing)"));
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

/** Deltas of one kind that follow each other; any other event by itself. */
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
  const prompt = story.prompts[row.turn - 1];
  if (prompt) cell.append(drawPrompt(prompt));
  else if (row.told_of?.prompt_tokens) cell.append(h("p", { className: "quiet", textContent: `Prompt of ${count(row.told_of.prompt_tokens, "token")}, which was not recorded` }));
}

function drawEnd(row, cell) {
  const { reason, output_tokens: output, reasoning_tokens: thought } = row.told_of.finished;
  const text = h("p", { className: "quiet" }, h("b", { textContent: reason.replaceAll("_", " ") }), ` after ${count(output, "token")}${thought ? `, ${thought.toLocaleString("en")} of thought` : ""}`);
  elements.frame[row.frames[0]] = text;
  cell.append(text);
}

// Drawing: the timeline

const SVG = "http://www.w3.org/2000/svg";
const LANES = { token: 0, frame: 1, event: 2 };
const LANE = 26;

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Where everything stands between 0 and 1: by its time, or by the order in which it came. */
function places() {
  const times = [...Object.values(tokens.times), ...frames.map((frame) => frame[2]), ...events.map((event) => event.at)].filter((at) => at !== null);
  const byTime = times.length > 0;
  const chunks = [...tokensOfChunk.keys()];
  const end = byTime ? Math.max(...[0.001], times.reduce((a, b) => Math.max(a, b), 0)) : (chunks.at(-1) ?? Math.max(frames.length, events.length)) + 1;
  const chunkAt = (chunk) => (byTime ? (tokens.times[chunk] ?? 0) : chunk) / end;
  let last = 0;
  const frame = frames.map(([, cause, at], index) => {
    if (byTime) last = (at ?? last * end) / end;
    else if (cause !== null) last = cause / end;
    else if (!chunks.length) last = index / end;
    return last;
  });
  const event = events.map(({ cause, at }, index) => (byTime ? (at ?? 0) / end : cause !== null ? frame[cause] : index / end));
  return { byTime, end, token: tokens.chunks.map(chunkAt), frame, event };
}

const at = places();
const ticks = (kind, numbers, top = 3, bottom = 19) => numbers.map((number) => `M${(at[kind][number] * 1000).toFixed(2)} ${LANES[kind] * LANE + top}V${LANES[kind] * LANE + bottom}`).join("");

function drawTimeline() {
  const picture = svg("svg", { viewBox: `0 0 1000 ${3 * LANE - 4}`, preserveAspectRatio: "none", role: "img", "aria-label": `${count(tokens.texts.length, "token")}, ${count(rows.filter((row) => row.kind === "item").length, "item")} and ${count(events.length, "event")}` });
  for (const lane of [0, 1, 2]) picture.append(svg("path", { class: "lane", d: `M0 ${lane * LANE + 11}H1000` }));
  CHANNELS.forEach((channel, index) => picture.append(svg("path", { class: `tick ${channel}`, d: ticks("token", [...tokens.channels].flatMap((each, token) => (each === String(index) ? [token] : []))) })));
  for (const row of rows) {
    if (row.kind !== "item") continue;
    const [from, to] = [at.frame[row.frames[0]], at.frame[row.frames.at(-1)]];
    const bar = svg("rect", { class: `span ${row.channel}`, x: from * 1000, width: Math.max(2, (to - from) * 1000), y: LANE + 4, height: 14, rx: 2 });
    picture.append(bar);
  }
  const deltas = events.map((event, number) => number).filter((number) => events[number].delta !== null);
  const others = events.map((event, number) => number).filter((number) => events[number].delta === null);
  picture.append(svg("path", { class: "tick delta", d: ticks("event", deltas, 7, 15) }), svg("path", { class: "tick event", d: ticks("event", others) }));
  picture.append(svg("path", { class: "tick lit", id: "lit" }));
  const names = h("div", { className: "lanes", "aria-hidden": "true" }, ...["tokens", "items", "events"].map((name) => h("span", { textContent: name })));
  const axis = h("div", { className: "axis", "aria-hidden": "true" });
  for (const part of [0, 0.25, 0.5, 0.75, 1]) axis.append(h("span", { textContent: at.byTime ? seconds(part * at.end) : part === 0 ? "first" : part === 1 ? "last" : "" }));
  $("timeline").append(names, h("div", {}, picture, axis));
  $("axis-is").textContent = at.byTime ? "Seconds since the request" : "No times were recorded: the axis is the order.";
  picture.addEventListener("click", (click) => {
    const box = picture.getBoundingClientRect();
    const kind = Object.keys(LANES)[Math.min(2, Math.floor((click.clientY - box.top) / (box.height / 3)))];
    const wanted = (click.clientX - box.left) / box.width;
    const nearest = at[kind].reduce((best, place, number) => (Math.abs(place - wanted) < Math.abs(at[kind][best] - wanted) ? number : best), 0);
    if (at[kind].length) choose(kind, nearest, true);
  });
}

// Selecting

let chosen = null;
let lit = [];

/** The element that stands for something; an event inside a fold that is closed is the fold. */
function elementOf(kind, number) {
  const element = elements[kind][number];
  return (kind === "event" && element?.closest("[hidden]")?.previousSibling) || element;
}

function light() {
  for (const element of lit) element.classList.remove("lit", "chosen");
  lit = [];
  if (!chosen) {
    $("lit").setAttribute("d", "");
    return;
  }
  const set = related(chosen.kind, chosen.number);
  for (const kind of ["token", "frame", "event", "row"]) {
    for (const number of set[kind]) {
      const element = elementOf(kind, number);
      if (!element) continue;
      element.classList.add("lit");
      lit.push(element);
    }
  }
  $("lit").setAttribute("d", ["token", "event"].map((kind) => ticks(kind, set[kind], 0, 22)).join(""));
  const own = elementOf(chosen.kind, chosen.number);
  own?.classList.add("chosen");
  if (own) lit.push(own);
}

function press(element, state) {
  if (!element) return;
  const name = element.getAttribute("role") === "option" ? "aria-selected" : "aria-pressed";
  if (element.hasAttribute(name)) element.setAttribute(name, String(state));
}

function choose(kind, number, move = false) {
  if (chosen) press(elementOf(chosen.kind, chosen.number), false);
  chosen = kind === null ? null : { kind, number };
  if (chosen && kind === "event") unfold(number);
  light();
  describe();
  if (!chosen) return;
  const element = elementOf(kind, number);
  press(element, true);
  if (move) focus(element);
}

function unfold(number) {
  const element = elements.event[number];
  if (element?.dataset.fold !== undefined) element.toggle(true);
}

// Telling of what is selected

function describe() {
  const aside = $("chosen");
  aside.replaceChildren();
  aside.hidden = !chosen;
  document.body.classList.toggle("choosing", Boolean(chosen));
  if (!chosen) return;
  const set = related(chosen.kind, chosen.number);
  const close = h("button", { type: "button", className: "close", title: "Close (Esc)" }, h("span", { "aria-hidden": "true", textContent: "×" }), h("span", { className: "unseen", textContent: "Close" }));
  close.addEventListener("click", () => choose(null));
  aside.append(h("div", { className: "chain" }, ...chain(set)), close, ...details());
  $("said").textContent = [...aside.querySelectorAll(".link")].map((link) => link.innerText).join(", ");
}

/** Tokens, then what they became, then the events: each a link to the place. */
function chain(set) {
  const links = [];
  const link = (kind, numbers, name, text) => {
    if (!numbers.length) return;
    const button = h("button", { type: "button", className: `link to-${kind}` }, h("span", { className: "quiet", textContent: name }), " ", h("b", { textContent: text }));
    button.addEventListener("click", () => choose(kind, numbers[0], true));
    if (links.length) links.push(h("span", { className: "arrow", "aria-label": "caused", role: "img", textContent: "→" }));
    links.push(button);
  };
  const written = set.token.slice(0, 8).map((token) => shown(textOf(token))).join("");
  link("token", set.token, set.token.length === 1 ? `token ${set.token[0]}` : count(set.token.length, "token"), clipped(written, set.token.length > 8));
  const items = set.row.filter((row) => rows[row].kind === "item");
  link("row", items, items.length === 1 ? "item" : count(items.length, "item"), items.length ? rows[items[0]].title : "");
  const kinds = [...new Set(set.frame.map((frame) => frames[frame][0]))];
  if (chosen.kind !== "row") link("frame", set.frame, count(set.frame.length, "frame"), kinds.join(", "));
  const types = [...new Set(set.event.map((event) => shortened(events[event].common.type)))];
  link("event", set.event, set.event.length === 1 ? `event ${events[set.event[0]].number}` : count(set.event.length, "event"), clipped(types.join(", "), false));
  return links;
}

function clipped(text, more) {
  const flat = text.replaceAll("\n", "↵");
  return flat.length > 60 || more ? `${flat.slice(0, 60)}…` : flat;
}

/** What is known of the selected thing itself. */
function details() {
  const { kind, number } = chosen;
  if (kind === "event") return [h("pre", { tabIndex: 0, textContent: JSON.stringify(whole(events[number]), null, 2) })];
  if (kind !== "token") return [];
  const parts = [h("p", { className: "quiet", textContent: tooltip(textOf(number), number) })];
  const mates = tokensOfChunk.get(tokens.chunks[number]).length - 1;
  const causes = (framesOfChunk.get(tokens.chunks[number]) ?? []).length;
  if (mates) parts.push(h("p", { className: "quiet", textContent: `It came in one chunk with ${count(mates, "other token")}: what the chunk caused, all of them did.` }));
  if (!causes && frames.length) parts.push(h("p", { className: "quiet", textContent: "By itself it caused nothing: it takes more tokens to tell what it is part of." }));
  const logprob = tokens.logprobs[number];
  if (logprob?.[1].length) {
    const list = h("ul", { className: "likely" });
    for (const [text, value] of logprob[1]) {
      const bar = h("span", { className: "likelihood" });
      bar.style.width = `${Math.exp(value) * 100}%`;
      list.append(h("li", {}, h("code", { textContent: text.replaceAll("\n", "↵") }), h("span", { className: "track" }, bar), h("span", { className: "number", textContent: likelihood(value) })));
    }
    parts.push(list);
  }
  return parts;
}

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

/** To a column: to what is lit in it, if anything is. */
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
  [["d"], "d", "light or dark", () => toggleTheme()],
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

const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const followSystem = () => (root.dataset.theme = prefersDark.matches ? "dark" : "light");

function toggleTheme() {
  prefersDark.removeEventListener("change", followSystem);
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
}

function drawKeys() {
  const list = h("dl", {}, ...KEYS.map(([, keys, text]) => h("div", {}, h("dt", {}, ...keys.split(" ").map((key) => h("kbd", { textContent: key }))), h("dd", { textContent: text }))));
  const close = h("button", { type: "button", textContent: "Close" });
  close.addEventListener("click", () => $("keys").close());
  $("keys").append(h("h2", { id: "keys-title", textContent: "Keys" }), list, close);
}

function drawLegend() {
  const used = new Set(tokens.channels);
  const legend = h("ul", { className: "legend", "aria-label": "Channels" });
  CHANNELS.forEach((channel, index) => used.has(String(index)) && index < 5 && legend.append(h("li", { className: channel, textContent: channel })));
  $("columns").firstElementChild.after(legend);
}

// All of it

followSystem();
prefersDark.addEventListener("change", followSystem);
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
$("theme").addEventListener("click", toggleTheme);
$("help").addEventListener("click", () => $("keys").showModal());
addEventListener("beforeprint", () => document.querySelectorAll("details.prompt").forEach((details) => ((details.open = true), details.drawn())));
