const CHANNELS = ["markup", "analysis", "commentary", "final", "call", "unread"];
const FOLDED_FROM = 2;
const LONGEST_LINE = 1000;

// The data, by index

const { tokens, frames, rows } = layout;
const events = layout.events.entries.map(([common, number, delta, cause, at]) => ({ common: layout.events.common[common], number, delta, cause, at }));
const grouped = (keys) => {
  const groups = new Map();
  keys.forEach((key, index) => key !== null && (groups.get(key) ?? groups.set(key, []).get(key)).push(index));
  return groups;
};
const tokensOfChunk = grouped(tokens.chunks);
const framesOfChunk = grouped(frames.map(([, cause]) => cause));
const eventsOfFrame = grouped(events.map((event) => event.cause));
const isLinked = frames.some(([, cause]) => cause !== null);
const rowOf = { token: [], frame: [], event: [] };
rows.forEach((row, index) => {
  for (const kind of Object.keys(rowOf)) for (const number of row[`${kind}s`] ?? []) rowOf[kind][number] = index;
});
const textOf = (token) => layout.texts[tokens.texts[token]];
const shown = (text) => (text[1] === null ? String(text[0]) : text[1]);

/** The complete event, as it was sent to the client. */
function whole(event) {
  return event.delta === null ? event.common : { ...event.common, sequence_number: event.number, delta: event.delta };
}

// Causes

const none = () => ({ token: [], frame: [], event: [], row: [] });

/** All tokens, frames, events and rows related to the selected one. */
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
