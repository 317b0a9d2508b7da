/* The page: what was used, read anew while the page is seen. */

const LOOK_MS = 30_000;

const ask = asking("usage/");

const COLUMNS = [
  ["Requests", "requests"],
  ["Input", "input_tokens"],
  ["Cached", "cached_tokens"],
  ["Output", "output_tokens"],
  ["Thoughts", "reasoning_tokens"],
];
const BY = { key: "Key", team: "Team", model: "Model", api: "API" };
const NAMELESS = { key: "no key", team: "no team", model: "no model", api: "no API" };

let data = null;
let chosen = null;
let timer = null;

const plot = new Plot($("plot"), (place) => {
  chosen = place;
  draw();
});

// Numbers

const whole = (value) => value.toLocaleString("en");
const short = (value) => value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
const money = (value) => `${value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: value !== 0 && Math.abs(value) < 0.1 ? 6 : 2 })} ${data.currency ?? ""}`.trim();
const cost = (value) => (value === null ? "–" : money(value));

/* The sum of the days that are shown: the chosen one, or all; null if none of them is known. */
function sum(values) {
  const shown = (chosen === null ? values : [values[chosen]]).filter((value) => value !== null);
  return shown.length ? shown.reduce((total, value) => total + value, 0) : null;
}

const MEASURES = {
  cost: { of: (group) => group.cost.map((value) => value ?? 0), format: money, title: "Cost" },
  tokens: { of: (group) => group.input_tokens.map((value, place) => value + group.output_tokens[place]), format: short, title: "Tokens" },
  requests: { of: (group) => group.requests, format: short, title: "Requests" },
};

const together = (field) => data.days.map((_, place) => {
  const known = data.groups.map((group) => group[field][place]).filter((value) => value !== null);
  return known.length ? known.reduce((total, value) => total + value, 0) : null;
});

const nameOf = ({ name, is_rest: isRest }, by) => (isRest ? "others" : name || NAMELESS[by]);

// Drawing

function draw() {
  const measure = MEASURES[$("measure").value];
  const by = $("by").value;
  const totals = new Map(data.groups.map((group) => [group, measure.of(group).reduce((a, b) => a + b, 0)]));
  const groups = [...data.groups].sort((a, b) => a.is_rest - b.is_rest || totals.get(b) - totals.get(a));
  const colours = new Map(groups.map((group, place) => [group, group.is_rest ? COLOURS : Math.min(place, COLOURS)]));
  $("plot-title").textContent = `${measure.title} by day`;
  plot.show(data.days, groups.map((group) => ({ name: nameOf(group, by), values: measure.of(group), colour: colours.get(group) })), measure.format, chosen);
  const when = chosen === null ? (data.days.length === 1 ? data.days[0] : `${data.days[0]} to ${data.days.at(-1)}`) : data.days[chosen];
  $("groups-title").textContent = `By ${by === "api" ? "API" : by}, ${when}`;
  $("whole").hidden = chosen === null;
  $("nothing").hidden = data.keeps && data.groups.length > 0;
  $("nothing").textContent = data.keeps ? "Nothing was used on these days." : "This server keeps no accounts: it has no store, or its --ledger-ttl is 0.";
  const costs = data.currency === null ? [] : ["Cost"];
  $("groups-head").replaceChildren(heads([BY[by], ...COLUMNS.map(([title]) => title), ...costs]));
  $("groups").replaceChildren(
    ...groups.map((group) => row([h("span", { className: `swatch s${colours.get(group)}`, "aria-hidden": "true" }), nameOf(group, by)], (field) => group[field])),
  );
  $("groups-sum").replaceChildren(row(["All"], together));
  $("days-head").replaceChildren(heads(["Day", ...COLUMNS.map(([title]) => title), ...costs]));
  $("day-rows").replaceChildren(
    ...data.days.map((day, place) => row([day], (field) => [together(field)[place]], (values) => values[0])).reverse(),
  );
  drawTotals();
  drawBudgets();
}

const heads = (titles) => h("tr", {}, ...titles.map((title) => h("th", { scope: "col", textContent: title })));

function row(name, valuesOf, total = sum) {
  const cells = COLUMNS.map(([, field]) => whole(total(valuesOf(field)) ?? 0));
  if (data.currency !== null) cells.push(cost(total(valuesOf("cost"))));
  return h("tr", {}, h("th", { scope: "row" }, ...name), ...cells.map((textContent) => h("td", { textContent })));
}

function drawTotals() {
  const facts = COLUMNS.map(([title, field]) => [title, whole(sum(together(field)) ?? 0)]);
  if (data.currency !== null) facts.unshift(["Cost", cost(sum(together("cost")))]);
  $("totals").replaceChildren(...facts.map(([title, value]) => h("div", {}, h("dt", { textContent: title }), h("dd", { textContent: value }))));
}

function drawBudgets() {
  $("budgets-part").hidden = !data.budgets.length;
  $("budgets").replaceChildren(
    ...data.budgets.map(({ whose, period, unit, most, spent, warn, until }) => {
      const amount = (value) => (unit === "tokens" ? `${whole(value)} tokens` : money(value));
      const share = spent / most;
      const percent = `${Math.floor(100 * share + 1e-6)} %`;
      const level = h("meter", { min: 0, max: 1, low: warn, high: 1, optimum: 0, value: Math.min(1, share), "aria-label": `${whose}, ${period}: ${percent}` });
      const cells = [amount(spent), `${amount(most)} a ${period}`, null, until.slice(0, 16).replace("T", " ")];
      return h(
        "tr",
        {},
        h("th", { scope: "row", textContent: whose }),
        ...cells.map((text) => (text === null ? h("td", { className: share >= 1 ? "over" : "" }, level, ` ${percent}`) : h("td", { textContent: text }))),
      );
    }),
  );
}

// The server

const OFF = "Its operator has not set PENSTOCK_OPERATOR_KEY. Start it with a key of at least 16 characters in that variable, or with --live, which makes one for the run.";

async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  const [days, by] = [$("days").value, $("by").value];
  try {
    const found = await ask(`data?days=${days}&by=${by}`).then((answer) => answer.json());
    if (days !== $("days").value || by !== $("by").value) return;
    take(found);
  } catch (error) {
    if (!(error instanceof Refused)) tell(`The server cannot be reached: ${error.message}.`);
    else if (error.status === 404) return lock(OFF, true);
    else if (error.status === 401) return lock(key.value ? "This is not the operator's key." : "");
    else tell(error.message);
  }
  timer = setTimeout(look, LOOK_MS);
}

function take(found) {
  const isFirst = data === null;
  if (data && data.days.length !== found.days.length) chosen = null;
  data = found;
  tell("");
  $("lock").hidden = true;
  $("usage").hidden = false;
  $("server").textContent = data.version;
  const hasCost = data.currency !== null;
  $("measure").querySelector("[value=cost]").hidden = !hasCost;
  if (isFirst && hasCost) $("measure").value = "cost";
  if (!hasCost && $("measure").value === "cost") $("measure").value = "tokens";
  draw();
}

function tell(problem) {
  $("problem").hidden = !problem;
  $("problem").textContent = problem;
  if (problem && data === null) lock(problem);
}

function lock(problem, isOff = false) {
  $("ask").hidden = isOff;
  $("lock-title").textContent = isOff ? "This server shows its accounts to nobody" : "The operator's key";
  $("lock-problem").classList.toggle("quiet", isOff);
  $("lock").hidden = false;
  $("usage").hidden = true;
  $("server").textContent = "";
  $("lock-problem").textContent = problem;
  data = null;
  $("key").focus();
}

// Input

$("entry").addEventListener("submit", (event) => {
  event.preventDefault();
  key.value = $("key").value.trim();
  look();
});
$("choices").addEventListener("submit", (event) => event.preventDefault());
for (const name of ["days", "by"]) $(name).addEventListener("change", look);
$("measure").addEventListener("change", draw);
$("whole").addEventListener("click", () => {
  chosen = null;
  draw();
  $("plot").focus();
});
document.addEventListener("visibilitychange", look);
addEventListener("keydown", ({ target, key: pressed, ctrlKey, metaKey, altKey }) => {
  if (pressed === "d" && !ctrlKey && !metaKey && !altKey && !target.closest("textarea, input, select")) theme.toggle();
});

/* Takes the key of the operator from the address. */
function enter() {
  if (location.hash.startsWith("#key=")) {
    key.value = decodeURIComponent(location.hash.slice(5));
    history.replaceState(null, "", location.pathname);
  }
  look();
}

addEventListener("hashchange", enter);
enter();
