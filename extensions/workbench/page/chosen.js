// Selecting

let chosen = null;
let lit = [];

/** The element of a token, frame, event or row; for an event inside a closed fold, the fold. */
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

// Describing the selection

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
  $("status").textContent = [...aside.querySelectorAll(".link")].map((link) => link.innerText).join(", ");
}

/** Links to the related tokens, items, frames and events, in causal order. */
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
  link("token", set.token, set.token.length === 1 ? `token ${set.token[0]}` : plural(set.token.length, "token"), clipped(written, set.token.length > 8));
  const items = set.row.filter((row) => rows[row].kind === "item");
  link("row", items, items.length === 1 ? "item" : plural(items.length, "item"), items.length ? rows[items[0]].title : "");
  const kinds = [...new Set(set.frame.map((frame) => frames[frame][0]))];
  if (chosen.kind !== "row") link("frame", set.frame, plural(set.frame.length, "frame"), kinds.join(", "));
  const types = [...new Set(set.event.map((event) => shortened(events[event].common.type)))];
  link("event", set.event, set.event.length === 1 ? `event ${events[set.event[0]].number}` : plural(set.event.length, "event"), clipped(types.join(", "), false));
  return links;
}

function clipped(text, more) {
  const flat = text.replaceAll("\n", "↵");
  return flat.length > 60 || more ? `${flat.slice(0, 60)}…` : flat;
}

/** Details of the selected token or event itself. */
function details() {
  const { kind, number } = chosen;
  if (kind === "event") return [h("pre", { tabIndex: 0, textContent: JSON.stringify(whole(events[number]), null, 2) })];
  if (kind !== "token") return [];
  const parts = [h("p", { className: "quiet", textContent: tooltip(textOf(number), number) })];
  const mates = tokensOfChunk.get(tokens.chunks[number]).length - 1;
  const causes = (framesOfChunk.get(tokens.chunks[number]) ?? []).length;
  if (mates) parts.push(h("p", { className: "quiet", textContent: `It came in one chunk with ${plural(mates, "other token")}: what the chunk caused, all of them did.` }));
  if (!isLinked) parts.push(h("p", { className: "quiet", textContent: "What it caused is not known." }));
  else if (!causes) parts.push(h("p", { className: "quiet", textContent: "By itself it caused nothing: it takes more tokens to tell what it is part of." }));
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
