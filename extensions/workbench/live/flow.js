/* The flow: each row has tokens, the item that they make, and its events.  It can be drawn at any token: rows are made
   once, and only those that differ from what is shown are touched. */

const LINE = 160; // tokens of a block at most: a block is laid out by itself

class RowView {
  constructor(take, row) {
    Object.assign(this, { take, row, blocks: [], made: row.from, shown: {} });
    this.tokens = h("div", { className: "tokens" });
    this.title = h("h3");
    this.detail = h("span", { className: "quiet" });
    this.text = h("p", { className: "text", dir: "auto" });
    this.notes = h("div", { className: "chips" });
    this.events = h("ol", { className: "events" });
    this.head = h("div", { className: "item-head" }, this.title, " ", this.detail);
    const cells = [h("div", { className: "cell" }, this.tokens), h("div", { className: "cell" }, this.head, this.text, this.notes)];
    this.element = h("article", { className: `row ${row.kind}` }, ...cells, h("div", { className: "cell" }, this.events));
    this.groups = [];
    this.grouped = 0;
  }

  /* Adds the tokens that have come since, in blocks. */
  grow() {
    const { take, row } = this;
    for (; this.made < row.to; this.made++) {
      const token = take.tokens[this.made];
      let block = this.blocks.at(-1);
      if (!block || block.closed) {
        block = { from: this.made, to: this.made, element: h("span", { className: "line" }), closed: false, read: 0, size: 0, here: null };
        this.blocks.push(block);
        this.tokens.append(block.element);
      }
      const text = shownToken(token.text);
      block.element.append(h("bdi", { className: `token ${token.channel}${token.mark ? " mark" : ""}`, textContent: text, title: `token ${this.made + 1} · id ${token.id} · ${seconds(token.at ?? 0)}` }));
      block.element.lastChild.dataset.token = this.made;
      block.to = this.made + 1;
      block.closed = block.to - block.from >= LINE || text.endsWith("\n");
    }
  }

  draw(count, out, focus) {
    const { take, row, shown } = this;
    this.grow();
    const isOpen = out.frames > row.openedAt;
    const length = isOpen ? row.lengthAt(out.frames) : 0;
    const events = below(row.events, out.events);
    const state = row.closedAt < out.frames ? "closed" : take.isOver && count >= take.tokens.length ? "closed" : "open";
    const name = isOpen ? row.name : "";
    this.element.hidden = row.kind !== "item" && !isOpen;
    if (shown.name !== name || shown.state !== state) {
      this.element.className = `row ${row.kind} ${isOpen && row.name ? row.channel : "unread"} ${name ? state : "unmade"}`;
      this.title.textContent = name;
      this.detail.textContent = name ? row.detail : "";
      this.head.hidden = !name;
    }
    if (shown.length !== length) this.write(length);
    if (shown.events !== events) this.list(events);
    const notes = row.notes.filter(([at]) => at < out.frames);
    if (shown.notes !== notes.length) this.notes.replaceChildren(...notes.map(([, text]) => h("span", { className: isCode(text.replace(/^\w+: /, "")) ? "chip code" : "chip", textContent: text.slice(0, 2000) })));
    for (const block of this.blocks) dim(block, count, focus);
    Object.assign(shown, { name, state, length, events, notes: notes.length });
  }

  write(length) {
    const text = this.row.text;
    this.text.classList.toggle("code", isCode(text));
    const before = this.shown.length ?? 0;
    const node = this.text.firstChild;
    if (length > LONGEST_TEXT) {
      this.text.textContent = `${text.slice(0, LONGEST_TEXT)}… (${plural(length - LONGEST_TEXT, "more character")})`;
    } else if (node && length > before && before <= LONGEST_TEXT) node.appendData(text.slice(before, length).replace(UNSEEN, named));
    else this.text.textContent = text.slice(0, length).replace(UNSEEN, named);
  }

  /* Shows the first `count` events; deltas in a row are one line. */
  list(count) {
    if (count < this.grouped) {
      this.groups = [];
      this.grouped = 0;
      this.events.replaceChildren();
    }
    const touched = new Set();
    for (; this.grouped < count; this.grouped++) {
      const number = this.row.events[this.grouped];
      const event = this.take.events[number];
      let group = this.groups.at(-1);
      if (!group || event.delta === undefined || group.type !== event.type) {
        group = { type: event.type, first: event.sequence_number, last: 0, count: 0, events: [] };
        this.groups.push(group);
        group.element = eventLine(group);
        this.events.append(h("li", {}, group.element));
      }
      group.last = event.sequence_number;
      group.count += 1;
      group.events.push(event);
      touched.add(group);
    }
    for (const group of touched) group.element.update();
  }
}

function eventLine(group) {
  const number = h("span", { className: "number" });
  const type = h("span", { className: "type", textContent: group.type.replace("response.", "") });
  const body = h("pre", { tabIndex: 0 });
  const line = h("details", { className: `event${group.type.endsWith("delta") ? " delta" : ""}` }, h("summary", {}, number, type), body);
  line.update = () => {
    const { first, last, count } = group;
    number.textContent = count > 1 ? `#${first}–${last}` : `#${first}`;
    type.textContent = `${count > 1 ? `${count} × ` : ""}${group.type.replace("response.", "")}`;
    if (line.open) line.fill();
  };
  line.fill = () => {
    const { type: _, at: __, ...rest } = group.events[0];
    const text = group.count > 1 ? group.events.map((event) => event.delta).join("") : JSON.stringify(rest, null, 2);
    body.textContent = text.slice(0, 20_000).replace(UNSEEN, named);
  };
  line.addEventListener("toggle", () => line.open && line.fill());
  return line;
}

/* Dims the tokens of a block that come after the slider, and marks the one at which it stands. */
function dim(block, count, focus) {
  const { children } = block.element;
  const read = Math.min(Math.max(count - block.from, 0), children.length);
  if (read !== block.read || children.length !== block.size) {
    const last = Math.max(block.read, read, children.length > block.size ? children.length : 0);
    for (let at = Math.min(block.read, read); at < last; at++) children[at].classList.toggle("ahead", at >= read);
    Object.assign(block, { read, size: children.length });
  }
  const here = block.from < focus && focus <= block.to ? children[focus - 1 - block.from] : null;
  if (here !== block.here) {
    block.here?.classList.remove("here");
    here?.classList.add("here");
    block.here = here;
  }
}

class Flow {
  constructor() {
    this.take = null;
    this.views = [];
  }

  show(take) {
    if (this.take === take) return;
    this.take = take;
    this.views = [];
    $("rows").replaceChildren();
  }

  /* Draws the take as it was when `count` tokens had come. */
  draw(count, marks) {
    const { take } = this;
    const out = take.after(count);
    for (let at = this.views.length; at < take.rows.length; at++) {
      this.views.push(new RowView(take, take.rows[at]));
      $("rows").append(this.views[at].element);
    }
    const focus = marks ? count : 0;
    for (const view of this.views) view.draw(count, out, focus);
  }

  /* Brings the token at which the slider stands into view, if it is not. */
  reveal(count) {
    const view = this.views.find(({ row }) => row.kind === "item" && row.from < count && count <= row.to);
    const block = view?.blocks.find(({ to }) => count <= to);
    block?.element.children[count - 1 - block.from]?.scrollIntoView({ block: "nearest" });
  }
}
