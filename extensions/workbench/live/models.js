/* The models of the server: a row for each, drawn anew every two seconds while the page is seen. */

const LOOK_MS = 2000;

/* Seconds over which tokens are counted for their rate. */
const RATE_SECONDS = 10;

const BUSY = ["starting", "stopping"];
const DOTS = { ready: "completed", failed: "failed", asleep: "asleep", starting: "running", stopping: "running" };

const ageOf = (age) => (age < 60 ? `${Math.floor(age)} s` : age < 3600 ? `${Math.floor(age / 60)} min` : age < 172_800 ? `${Math.floor(age / 3600)} h` : `${Math.floor(age / 86_400)} days`);
const sizeOf = (bytes) => (bytes < 2 ** 30 ? `${Math.round(bytes / 2 ** 20)} MiB` : `${(bytes / 2 ** 30).toFixed(1)} GiB`);
const rateOf = (rate) => rate.toLocaleString("en", { maximumFractionDigits: rate < 100 ? 1 : 0 });
const sentence = (words) => words && `${words[0].toUpperCase()}${words.slice(1)}.`;

function placeOf({ is_child: isChild, pid, servers }) {
  if (isChild) return pid ? `process ${pid}` : "no process";
  if (!servers.length) return "this process";
  const names = servers.map(({ address, is_up: isUp }) => (isUp === false ? `${address} (down)` : address));
  return names.length > 3 ? `${names.slice(0, 2).join(", ")} and ${names.length - 2} more` : names.join(", ");
}

/* The row of one model: its elements stay the same, so that none loses the focus. */
class ModelRow {
  constructor(name, choose) {
    this.samples = [];
    this.button = h("button", { type: "button", title: `Talk to ${name}`, textContent: name });
    this.button.addEventListener("click", () => choose(name));
    this.plain = h("span", { textContent: name });
    this.names = h("span", { className: "quiet" });
    this.state = h("span");
    this.age = h("span", { className: "quiet" });
    this.reason = h("p", { className: "failure" });
    const cell = (title, ...children) => h("td", { role: "cell", "data-title": title }, ...children);
    this.head = h("th", { role: "rowheader", scope: "row" }, this.plain, this.names);
    this.cells = Object.fromEntries(["Runs on", "Running", "Waiting", "Tokens/s", "Cached", "Memory"].map((title) => [title, cell(title)]));
    this.element = h("tr", { role: "row" }, this.head, cell("State", this.state, " ", this.age, this.reason), ...Object.values(this.cells));
  }

  draw(model, at, canChoose, isChosen) {
    const { names, kind, is_read: isRead, state, changed_at: changedAt, tokens_read: read, tokens_cached: cached, memory_bytes: memory } = model;
    const shown = canChoose && isRead ? this.button : this.plain;
    if (this.head.firstChild !== shown) this.head.firstChild.replaceWith(shown);
    this.button.setAttribute("aria-pressed", String(isChosen));
    put(this.names, [kind === "generate" ? "" : kind, ...names].filter(Boolean).join(", "));
    put(this.state, state);
    this.state.className = `state ${DOTS[state] ?? ""}`;
    put(this.age, changedAt === null ? "" : `for ${ageOf(Math.max(0, at - changedAt))}`);
    put(this.reason, sentence(model.reason));
    put(this.cells["Runs on"], placeOf(model));
    put(this.cells.Running, String(model.running));
    put(this.cells.Waiting, String(model.waiting));
    const rate = isRead ? this.rate(at, model.tokens_written) : null;
    put(this.cells["Tokens/s"], rate === null ? "–" : rateOf(rate));
    put(this.cells.Cached, isRead && read ? `${Math.floor((100 * cached) / read)} %` : "–");
    put(this.cells.Memory, memory === null ? "–" : sizeOf(memory));
  }

  /* The tokens of a second, since the oldest look of the last seconds; null at the first look. */
  rate(at, tokens) {
    const since = at - RATE_SECONDS - 0.5;
    this.samples = this.samples.filter((sample) => sample.at >= since && sample.at < at && sample.tokens <= tokens);
    this.samples.push({ at, tokens });
    const [oldest] = this.samples;
    return at > oldest.at ? (tokens - oldest.tokens) / (at - oldest.at) : null;
  }
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

class Models {
  rows = new Map();
  known = [];
  since = null;
  timer = null;
  problem = "";
  isLooking = false;

  constructor() {
    document.addEventListener("visibilitychange", () => this.look());
    $("model").addEventListener("change", () => this.draw());
  }

  /* Looks now, and again as long as the page is seen. */
  async look() {
    clearTimeout(this.timer);
    if (document.hidden || !server || this.isLooking) return;
    this.isLooking = true;
    try {
      this.take(await askJson("models"));
      this.note("");
    } catch (error) {
      if (error.status === 401) return lock("This key does not open the page any more.");
      this.note(error instanceof Refused ? error.message : "The server cannot be reached.");
    } finally {
      this.isLooking = false;
    }
    this.timer = setTimeout(() => this.look(), LOOK_MS);
  }

  /* Shows why nothing new is known, and tells it once; or the summary. */
  note(problem) {
    $("models-note").classList.toggle("failure", Boolean(problem));
    put($("models-note"), problem || this.summary());
    if (problem && problem !== this.problem) $("announced").textContent = problem;
    this.problem = problem;
  }

  /* The number of models in each state, if there are several. */
  summary() {
    if (this.known.length < 2) return "";
    const states = new Map();
    for (const { state } of this.known) states.set(state, (states.get(state) ?? 0) + 1);
    return [...states].map(([state, count]) => `${count} ${state}`).join(", ");
  }

  take({ now: at, since, data }) {
    this.tell(data);
    if (since !== this.since) this.rows.forEach((row) => (row.samples = []));
    Object.assign(this, { at, since, known: data });
    $("models").hidden = false;
    this.draw();
    const { scrollHeight, clientHeight } = $("models-sheet");
    if (scrollHeight > clientHeight) $("models-sheet").tabIndex = 0;
    else $("models-sheet").removeAttribute("tabindex");
  }

  /* Tells those who do not see the page when the state of a model has changed. */
  tell(data) {
    const before = new Map(this.known.map(({ name, state }) => [name, state]));
    const news = data.filter(({ name, state }) => before.has(name) && before.get(name) !== state && !BUSY.includes(state));
    if (news.length) $("announced").textContent = news.map(({ name, state, reason }) => `${name}: ${state}. ${sentence(reason)}`).join(" ");
  }

  draw() {
    this.offer();
    const chosen = this.known.find(({ name, names }) => [name, ...names].includes($("model").value));
    const canChoose = this.known.filter((each) => each.is_read).length > 1;
    for (const model of this.known) {
      if (!this.rows.has(model.name)) this.rows.set(model.name, new ModelRow(model.name, talkTo));
      this.rows.get(model.name).draw(model, this.at, canChoose, model === chosen);
    }
    const elements = this.known.map(({ name }) => this.rows.get(name).element);
    const shown = [...$("models-rows").children];
    if (elements.length !== shown.length || elements.some((each, place) => each !== shown[place])) $("models-rows").replaceChildren(...elements);
    $("models").classList.toggle("no-memory", this.known.every((each) => each.memory_bytes === null));
    entitle(this.known);
  }

  /* Offers the names of all models that generate; patterns are no names. */
  offer() {
    const offered = this.known.filter((each) => each.is_read).flatMap(({ name, names }) => [[name, name], ...names.filter((each) => !/[*?[]/.test(each)).map((each) => [each, `${each} (${name})`])]);
    const signature = JSON.stringify(offered);
    if ($("model").dataset.offers === signature) return;
    const before = $("model").value;
    $("model").dataset.offers = signature;
    $("model").replaceChildren(...offered.map(([value, textContent]) => h("option", { value, textContent })));
    if (offered.some(([value]) => value === before)) $("model").value = before;
  }
}
