/* The page: what runs, what is shown, and what the keys do. */

const MOST_TAKES = 12;

const takes = [];
let shown = null;
let server = null;
let running = null;

const thread = new Thread();
const flow = new Flow();
const beside = new Beside();
const slider = new Slider(() => draw(true));
const models = new Models();

// Drawing: at most once for each frame of the screen, whatever has come

let isDue = false;

function schedule() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw(false);
  });
}

function draw(isMoved) {
  slider.update(shown);
  $("empty").hidden = Boolean(shown);
  $("facts").hidden = !shown;
  $("flow").hidden = $("transport").hidden = !shown || (shown.isOver && !shown.rows.length);
  for (const take of takes) thread.update(take);
  if (!shown) return;
  flow.show(shown);
  flow.draw(slider.count, !slider.follows);
  beside.show(shown);
  describe();
  offer();
  if (isMoved && !slider.follows) flow.reveal(slider.count);
  else if (slider.follows && sticks && running?.take === shown) scrollTo(0, document.documentElement.scrollHeight);
}

/* The page follows a running answer, until its reader scrolls back. */
let sticks = true;
let lastTop = 0;

addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = document.documentElement;
  if (scrollHeight - clientHeight - scrollTop < 100) sticks = true;
  else if (scrollTop < lastTop) sticks = false;
  lastTop = scrollTop;
});

function describe() {
  const { state, tokens, events, firstAt, rate, problem, early, leftOut } = shown;
  const words = { waiting: "waiting for the engine", running: "running", ended: "read to its end" };
  $("by").hidden = models.known.length < 2 || !shown.model;
  $("model-of").textContent = shown.model ?? "";
  $("state").textContent = words[state] ?? state;
  $("state").className = `state ${state}`;
  $("count").textContent = tokens.length.toLocaleString("en");
  $("events-count").textContent = events.length.toLocaleString("en");
  $("first-token").textContent = firstAt === null ? "–" : seconds(firstAt);
  $("rate").textContent = rate === null ? "–" : `${rate.toLocaleString("en", { maximumFractionDigits: rate < 100 ? 1 : 0 })}/s`;
  const notes = [
    problem && ["failure", problem],
    early && ["", early],
    leftOut && ["", `${plural(leftOut, "frame")} left out: this page was too slow.`],
    shown.isOver && !tokens.length && events.length && ["", "This answer has no tokens: its items were recorded, or a backend of texts wrote them."],
  ].filter(Boolean);
  const signature = JSON.stringify(notes);
  if ($("notes").dataset.shown === signature) return;
  $("notes").dataset.shown = signature;
  $("notes").replaceChildren(...notes.map(([kind, text]) => h("p", { className: `note ${kind}`, textContent: text })));
}

/* Offers to go on from the token of the slider, or says why not. */
function offer() {
  const why = shown.whyNot(slider.count, server);
  $("go-on").disabled = Boolean(why || running);
  $("go-on").title = why || (running ? "A response runs." : "Go on from here (g)");
  $("why-not").textContent = why;
}

/* Shows a tab for each take; they stay the same elements, so that none loses the focus. */
function tabs() {
  const list = takes.map((take) => {
    if (!take.tab) {
      take.tab = h("button", { type: "button", "aria-controls": "flow" }, h("bdi", { textContent: take.title }));
      take.tab.setAttribute("role", "tab");
      take.tab.addEventListener("click", () => choose(take));
    }
    take.tab.setAttribute("aria-selected", String(take === shown));
    take.tab.tabIndex = take === shown ? 0 : -1;
    return take.tab;
  });
  const known = [...$("takes").children];
  if (list.length !== known.length || list.some((tab, at) => tab !== known[at])) $("takes").replaceChildren(...list);
  $("takes").hidden = takes.length < 2;
  $("takes").scrollLeft = shown.tab.offsetLeft - ($("takes").clientWidth - shown.tab.offsetWidth) / 2;
}

function choose(take, count = Infinity) {
  shown = take;
  slider.follows = count >= take.tokens.length;
  slider.count = Math.min(count, take.tokens.length);
  tabs();
  draw(true);
}

// Running

async function run(take, open) {
  running?.abort.abort();
  takes.push(take);
  if (takes.length > MOST_TAKES) takes.shift();
  const current = (running = { take, abort: new AbortController() });
  $("stop").disabled = false;
  sticks = true;
  choose(take);
  try {
    await readEvents(await open(current.abort.signal), (kind, data) => {
      take.take(kind, data);
      schedule();
    });
    if (!take.isOver) fail(take, "The stream broke off: the server, or the way to it, was lost.");
  } catch (error) {
    if (error.name === "AbortError") fail(take, "", "stopped");
    else if (error instanceof Refused) fail(take, `${error.message}${error.param ? ` (${error.param})` : ""}`);
    else fail(take, `The stream broke off: ${error.message}.`);
    if (error.status === 401) lock("This key does not open the page any more.");
  } finally {
    draw(false);
    if (running === current) running = null;
    $("stop").disabled = !running;
    $("announced").textContent = `${take.title}: ${take.state}`;
    draw(false);
  }
}

function fail(take, problem, state = "failed") {
  take.state = state;
  take.problem = problem;
}

function send() {
  const text = $("input").value.trim();
  if (!text) return;
  let body;
  try {
    body = thread.body(text);
    $("more-problem").textContent = "";
  } catch (error) {
    $("more-problem").textContent = `The parameters are not JSON: ${error.message}`;
    $("parameters").open = true;
    return;
  }
  const take = new Take(text.slice(0, 40), body);
  thread.begin(text, take);
  $("input").value = "";
  run(take, (signal) => watch(body, signal));
}

function goOn() {
  if ($("go-on").disabled) return;
  const count = slider.count;
  const old = shown;
  const body = old.continued(count);
  const take = new Take(`From token ${count}`, old.request, { old, count, from: old.begun(count).from });
  take.prompts = Array(old.begun(count).turn - 1).fill(null);
  run(take, (signal) => watch(body, signal));
}

const stop = () => running?.abort.abort();

// The server

const OFF = "Its operator has not set PENSTOCK_OPERATOR_KEY. Start it with --live, which makes a key for the run and prints the address of this page with it, or with a key of at least 16 characters in that variable.";

async function loadServer() {
  try {
    server = await askJson("server");
    const { data } = await askJson("recordings");
    unlock(data);
  } catch (error) {
    if (error instanceof Refused) {
      const off = error.status === 404;
      lock(off ? OFF : error.status === 401 ? (key.value ? "This is not the operator's key." : "") : error.message, off);
    } else lock(`The server cannot be reached: ${error.message}.`);
  }
}

function lock(problem, isOff = false) {
  $("ask").hidden = isOff;
  $("lock-title").textContent = isOff ? "This server shows its stages to nobody" : "The operator's key";
  $("lock-problem").classList.toggle("quiet", isOff);
  $("lock").hidden = false;
  $("talk").hidden = $("watch").hidden = $("models").hidden = true;
  server = null;
  $("lock-problem").textContent = problem;
  $("server").textContent = "";
  $("key").focus();
}

function unlock(recordings) {
  $("lock").hidden = true;
  $("talk").hidden = $("watch").hidden = false;
  models.look();
  $("recordings").hidden = !server.records;
  $("no-recordings").hidden = recordings.length > 0;
  $("recorded").replaceChildren(
    ...recordings.map(({ id, model, recorded_at: at }) => {
      const button = h("button", { type: "button" }, h("b", { textContent: model || id }), h("span", { className: "quiet", textContent: at ? new Date(at).toLocaleString() : id }));
      button.addEventListener("click", () => showRecording(id, `${model} · ${id.slice(-6)}`));
      return h("li", {}, button);
    }),
  );
  draw(false);
  if (wanted) {
    const id = wanted;
    wanted = null;
    showRecording(id, `Response · ${id.slice(-6)}`);
  }
}

/* Names the server by its only model, or by their number. */
function entitle(known) {
  const { is_alive: isAlive, version } = server;
  $("server").textContent = isAlive ? `${known.length === 1 ? known[0].name : plural(known.length, "model")} · ${version}` : "The engine has died.";
  $("server").classList.toggle("failure", !isAlive);
}

function talkTo(name) {
  $("model").value = name;
  models.draw();
  $("input").focus();
}

const UNRECORDED = "This server records nothing. Started with --record FOLDER, it shows the answers of all clients here.";

const showRecording = (id, title) =>
  run(new Take(title, null), (signal) => (server.records ? recording(id, signal) : Promise.reject(new Refused(404, UNRECORDED))));

// Input

$("entry").addEventListener("submit", (event) => {
  event.preventDefault();
  key.value = $("key").value.trim();
  loadServer();
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", stop);
$("go-on").addEventListener("click", goOn);
$("anew").addEventListener("click", () => thread.clear());
$("help").addEventListener("click", () => $("keys").showModal());
$("recordings").addEventListener("toggle", () => $("recordings").open && loadServer());
$("rows").addEventListener("click", ({ target }) => {
  if (target.dataset.token !== undefined) slider.go(Number(target.dataset.token) + 1);
});
addEventListener("resize", schedule);

const KEYS = {
  ArrowLeft: ({ shiftKey }) => slider.step(shiftKey ? -10 : -1),
  ArrowRight: ({ shiftKey }) => slider.step(shiftKey ? 10 : 1),
  Home: () => slider.step(-Infinity),
  End: () => slider.step(Infinity),
  g: goOn,
  d: () => theme.toggle(),
  "?": () => $("keys").showModal(),
};

addEventListener("keydown", (event) => {
  const { target, key: pressed } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  if (pressed === "Escape") stop();
  if (target.closest("textarea, input:not([type=range])")) return;
  if (target.getAttribute("role") === "tab" && pressed.startsWith("Arrow")) return turn(target, pressed === "ArrowRight" ? 1 : -1);
  const act = KEYS[pressed];
  if (!act || (!shown && pressed !== "d" && pressed !== "?")) return;
  event.preventDefault();
  act(event);
});

function turn(tab, by) {
  const at = takes.findIndex((take) => take.tab === tab) + by;
  if (!takes[at]) return;
  choose(takes[at]);
  takes[at].tab.focus();
}

/* The recorded response that the address names, until it is shown. */
let wanted = null;

/* Takes what the address brings after its "#": the key of the operator, or a response to show. */
function enter() {
  const given = Object.fromEntries(location.hash.slice(1).split("&").map((each) => each.split(/=(.*)/s, 2).map(decodeURIComponent)));
  if (given.key) key.value = given.key;
  wanted = given.response ?? null;
  history.replaceState(null, "", location.pathname);
  loadServer();
}

addEventListener("hashchange", enter);
enter();
