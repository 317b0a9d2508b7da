/* A take: one answer, with its tokens, the frames of items and the events in the order in which they came.
   `framesAfter[n]` and `eventsAfter[n]` are the counts of both when n tokens had come, and before the next one did. */

const CHANNELS = ["markup", "analysis", "commentary", "final", "call", "unread"];

function channelOf(frame) {
  if (frame.type === "ReasoningOpened") return "analysis";
  if (frame.type === "MessageOpened") return frame.phase === "commentary" ? "commentary" : "final";
  return frame.type === "RefusalOpened" ? "final" : "call";
}

const NAMES = { ReasoningOpened: "Reasoning", MessageOpened: "Message", RefusalOpened: "Refusal", CompactionOpened: "Summary" };

function nameOf(frame) {
  if (frame.type === "MessageOpened") return frame.phase === "commentary" ? "Message · commentary" : "Message";
  const words = frame.type.replace("Opened", "").replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase();
  return NAMES[frame.type] ?? words[0].toUpperCase() + words.slice(1);
}

class Row {
  constructor(kind, turn, token, frame) {
    Object.assign(this, { kind, turn, from: token, to: token, openedAt: frame, closedAt: Infinity });
    Object.assign(this, { name: "", detail: "", channel: "unread", pieces: [], length: 0, ends: [], frames: [], events: [], notes: [] });
  }

  add(text, frame) {
    this.pieces.push(text);
    this.length += text.length;
    this.ends.push(this.length);
    this.frames.push(frame);
  }

  get text() {
    if (this.pieces.length > 1) this.pieces = [this.pieces.join("")];
    return this.pieces[0] ?? "";
  }

  lengthAt(frames) {
    const count = below(this.frames, frames);
    return count ? this.ends[count - 1] : 0;
  }
}

/* The number of values in an ascending list that are below a limit. */
function below(list, limit) {
  let low = 0;
  for (let high = list.length; low < high; ) {
    const middle = (low + high) >> 1;
    if (list[middle] < limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

class Take {
  constructor(title, request, origin = null) {
    Object.assign(this, { title, request, origin, state: "waiting", problem: "", early: "", leftOut: 0, goesOn: true });
    Object.assign(this, { tokens: [], events: [], rows: [], prompts: [], texts: new Map(), framesAfter: [], eventsAfter: [], frames: 0 });
    this.turn = 0;
    this.open = null;
    this.response = null;
    this.firstAt = null;
    this.lastAt = null;
  }

  take(kind, data) {
    if (kind === "texts") for (const [id, text] of Object.entries(data)) this.texts.set(Number(id), text);
    else if (kind === "render") this.prompts.push(data.token_ids);
    else if (kind === "generate") this.takeTokens(data);
    else if (kind === "converse" || kind === "parse") this.takeFrame(data);
    else if (kind === "emit") this.takeEvent(data);
    else if (kind === "left_out") this.leftOut = data.frames;
    else if (kind === "recording") this.describe(data);
    else if (kind === "end") this.end(data);
  }

  describe({ request, header, goes_on }) {
    this.request = request;
    this.model = header.model;
    this.goesOn = goes_on;
  }

  takeTokens(frame) {
    if (frame.type === "GenerationStarted") this.begin(frame);
    for (const id of frame.token_ids ?? []) {
      const last = this.rows.at(-1);
      const row = last?.kind === "item" && last.closedAt === Infinity ? last : this.addRow("item");
      this.framesAfter.push(this.frames);
      this.eventsAfter.push(this.events.length);
      const token = { id, at: frame.at, turn: this.turn, row, ...this.spelled(id) };
      token.channel = token.mark ? "markup" : this.open ? this.open.channel : "markup";
      this.tokens.push(token);
      row.to = this.tokens.length;
      this.firstAt ??= frame.at;
      this.lastAt = frame.at;
      this.fresh = token;
    }
  }

  /* The text of a token; a character of several tokens belongs to the last of them. */
  spelled(id) {
    const { text, hex, mark } = this.texts.get(id) ?? {};
    if (text !== undefined) {
      this.decoder = null;
      return { text, mark };
    }
    if (!hex) return { text: `${id} `, mark: false };
    this.decoder ??= new TextDecoder();
    const bytes = Uint8Array.from(hex.match(/../g), (byte) => parseInt(byte, 16));
    return { text: this.decoder.decode(bytes, { stream: true }), mark: false, part: true };
  }

  begin(frame) {
    this.turn += 1;
    const row = this.addRow("turn");
    row.name = `Turn ${this.turn}`;
    row.detail = `after ${plural(frame.prompt_tokens, "token")} of prompt`;
    this.open = null;
    this.state = "running";
  }

  addRow(kind) {
    const row = new Row(kind, this.turn, this.tokens.length, this.frames);
    this.rows.push(row);
    return row;
  }

  takeFrame(frame) {
    const at = this.frames++;
    const { type } = frame;
    if (type === "GenerationStarted" || type === "ResponseStarted") {
      if (type === "GenerationStarted" && !this.rows.some((row) => row.kind === "turn" && row.turn === this.turn)) this.begin(frame);
    } else if (type.endsWith("Opened")) {
      const last = this.rows.at(-1);
      const row = last?.kind === "item" && !last.name && !frame.caller ? last : this.addRow("item");
      Object.assign(row, { name: nameOf(frame), channel: channelOf(frame), openedAt: at });
      row.detail = [frame.namespace ?? frame.server_label, frame.name].filter(Boolean).join(".");
      if (frame.caller) row.detail += " by the program";
      this.open = row;
    } else if (type === "ItemDelta" && this.open) {
      this.open.add(frame.text, at);
      if (this.fresh && !this.fresh.mark) this.fresh.channel = this.open.channel;
    } else if (type === "CallFinished" && this.open) {
      this.open.notes.push([at, frame.error ? `failed: ${frame.error}` : `result: ${frame.result ?? ""}`]);
    } else if (type === "ItemClosed" && this.open) {
      this.open.closedAt = at;
      for (const repair of frame.repairs ?? []) this.open.notes.push([at, `repaired: ${repair}`]);
      this.open = null;
    } else if (type === "TurnFinished") {
      const row = this.addRow("end");
      row.openedAt = at;
      row.name = `Turn ${this.turn} ends`;
      row.detail = `${frame.reason}, ${plural(frame.output_tokens, "token")}`;
      this.open = null;
    }
    this.fresh = null;
  }

  takeEvent(event) {
    if (!event.type.startsWith("response.")) return;
    const row = this.rows.at(-1) ?? Object.assign(this.addRow("turn"), { name: "Start", openedAt: -1 });
    row.events.push(this.events.length);
    this.events.push(event);
    this.model = event.response?.model ?? this.model;
    if (/\.(completed|incomplete|failed)$/.test(event.type) && event.response) this.response = event.response;
  }

  end({ failure, unfinished, why }) {
    this.state = failure ? "failed" : (this.response?.status ?? (unfinished ? "unfinished" : why ? "broken off" : "ended"));
    this.problem = failure?.message ?? this.response?.error?.message ?? "";
    if (why) this.early = unfinished ? `The recording has no end: ${why}.` : `The recorded stream ends early: ${why}.`;
  }

  /* The counts of frames and events that were out when `count` tokens had come. */
  after(count) {
    if (count >= this.tokens.length) return { frames: this.frames, events: this.events.length };
    return { frames: this.framesAfter[count], events: this.eventsAfter[count] };
  }

  get isOver() {
    return !["waiting", "running"].includes(this.state);
  }

  get rate() {
    const time = this.lastAt - this.firstAt;
    return time > 0 ? (this.tokens.length - 1) / time : null;
  }

  /* What a turn had read and written when `count` tokens had come. */
  begun(count) {
    const turn = this.tokens[count - 1].turn;
    const from = this.tokens.findIndex((token) => token.turn === turn);
    return { turn, from, prompt: this.prompts[turn - 1], tokens: this.tokens.slice(from, count).map((token) => token.id) };
  }

  /* Why no engine can go on after `count` tokens; empty if it can. */
  whyNot(count, server) {
    if (!server?.goes_on) return "No engine generates here: recordings or a backend of texts answer.";
    if (!this.request) return "Its request was not recorded.";
    if (!this.goesOn) return "It is the answer of another model.";
    if (!count) return "Step to a token first.";
    const { prompt } = this.begun(count);
    if (!prompt) return "Its prompt is not known.";
    if (/^<\|(return|call)\|>$/.test(this.tokens[count - 1].text)) return "The turn ends with this token.";
    return "";
  }

  /* The request of a continuation: items of earlier turns come before it as input. */
  continued(count) {
    const { turn, prompt, tokens } = this.begun(count);
    const { stream, background, store, ...request } = this.request;
    if (turn > 1) {
      const last = this.rows.find((row) => row.kind === "turn" && row.turn === turn);
      const earlier = this.events.slice(0, last.events[0] ?? this.events.length).filter((event) => event.type === "response.output_item.done");
      const input = typeof request.input === "string" ? [{ role: "user", content: request.input }] : request.input;
      request.input = [...input, ...earlier.map((event) => event.item)];
    }
    return { ...request, store: false, go_on: { prompt, tokens } };
  }
}
