// Drawing: the timeline

const SVG = "http://www.w3.org/2000/svg";
const LANES = { token: 0, frame: 1, event: 2 };
const LANE = 26;

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** The positions of tokens, frames and events between 0 and 1: by time if it was recorded, otherwise by order. */
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
    else if (!isLinked) last = index / frames.length;
    return last;
  });
  const event = events.map(({ cause, at }, index) => (byTime ? (at ?? 0) / end : cause !== null ? frame[cause] : index / end));
  return { byTime, end, token: tokens.chunks.map(chunkAt), frame, event };
}

const at = places();
const ticks = (kind, numbers, top = 3, bottom = 19) => numbers.map((number) => `M${(at[kind][number] * 1000).toFixed(2)} ${LANES[kind] * LANE + top}V${LANES[kind] * LANE + bottom}`).join("");

/** Round times of an axis that ends at `end`, each with its place: about five steps of 1, 2 or 5 times a power of ten. */
function roundTimes(end) {
  const power = 10 ** Math.floor(Math.log10(end / 6));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => end / each <= 6);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  return Array.from({ length: Math.floor(end / step) + 1 }, (_, number) => [(number * step) / end, (number * step).toFixed(digits)]);
}

function drawLabel([place, textContent]) {
  const label = h("span", { className: place === 0 ? "from" : place > 0.96 ? "to" : "", textContent });
  label.style.left = `${place * 100}%`;
  return label;
}

function drawTimeline() {
  const picture = svg("svg", { viewBox: `0 0 1000 ${3 * LANE - 4}`, preserveAspectRatio: "none", role: "img", "aria-label": `${plural(tokens.texts.length, "token")}, ${plural(rows.filter((row) => row.kind === "item").length, "item")} and ${plural(events.length, "event")}` });
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
  if (atFault >= 0) picture.append(svg("path", { class: "tick fault", d: ticks("token", [atFault], 0, 22) }));
  picture.append(svg("path", { class: "tick lit", id: "lit" }));
  const names = h("div", { className: "lanes", "aria-hidden": "true" }, ...["tokens", "items", "events"].map((name) => h("span", { textContent: name })));
  const axis = h("div", { className: "axis", "aria-hidden": "true" });
  const [unit, perSecond] = at.end < 1 ? ["Milliseconds", 1000] : ["Seconds", 1];
  axis.append(...(at.byTime ? roundTimes(at.end * perSecond) : [[0, "first"], [1, "last"]]).map(drawLabel));
  $("timeline").append(names, h("div", {}, picture, axis));
  $("axis-is").textContent = at.byTime ? `${unit} since the request` : "No times were recorded: the axis is the order.";
  picture.addEventListener("click", (click) => {
    const box = picture.getBoundingClientRect();
    const kind = Object.keys(LANES)[Math.min(2, Math.floor((click.clientY - box.top) / (box.height / 3)))];
    const wanted = (click.clientX - box.left) / box.width;
    const nearest = at[kind].reduce((best, place, number) => (Math.abs(place - wanted) < Math.abs(at[kind][best] - wanted) ? number : best), 0);
    if (at[kind].length) choose(kind, nearest, true);
  });
}
