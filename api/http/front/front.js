/* The page: one request, its stream, and the same request elsewhere. */

const base = new URL("v1", document.baseURI).href;
const headers = () => {
  const key = $("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
};

/* The server's own words about a request that it refused. */
async function refusal(answer) {
  const text = await answer.text();
  try {
    const { message, param, code } = JSON.parse(text).error;
    const facts = [param && `param ${param}`, code && `code ${code}`].filter(Boolean).join(", ");
    return `${answer.status}: ${message}${facts ? ` (${facts})` : ""}`;
  } catch {
    return `${answer.status}: ${text.slice(0, 500)}`;
  }
}

async function loadModels() {
  try {
    const answer = await fetch(`${base}/models`, { headers: headers() });
    $("keyed").hidden &&= answer.status !== 401;
    showAgain();
    if (!answer.ok) {
      const needsKey = answer.status === 401 && !$("key").value;
      $("models").textContent = needsKey ? "It needs an API key." : await refusal(answer);
      return;
    }
    const { data } = await answer.json();
    const names = data.filter(({ kind }) => ["generate", "any"].includes(kind)).map(({ id }) => id);
    $("models").textContent = `It serves ${names.slice(0, 5).join(", ")}${names.length > 5 ? `, and ${names.length - 5} more` : ""}.`;
    $("names").replaceChildren(...names.map(value => h("option", { value })));
    $("model").value ||= names[0];
    showAgain();
  } catch (error) {
    $("models").textContent = `The server cannot be reached: ${error.message}`;
  }
}

/* Output items: each has a block, to which its deltas are added.  The finished item has the last word. */
const CHANNELS = { message: "final", reasoning: "analysis" };
const blocks = new Map();

function blockOf(index, item) {
  if (blocks.has(index)) return blocks.get(index);
  const title = h("h3", { textContent: [item.type.replaceAll("_", " "), item.name].filter(Boolean).join(": ") });
  const text = h("pre", { dir: "auto" });
  $("items").append(h("article", { className: `item ${CHANNELS[item.type] ?? "call"}` }, title, text));
  blocks.set(index, text);
  return text;
}

const written = parts => (parts ?? []).map(part => part.text ?? part.refusal ?? "").join("\n\n");

function finished(item) {
  if (item.type === "message") return written(item.content);
  if (item.type === "reasoning") return written(item.summary) || written(item.content);
  if (item.type === "function_call") return item.arguments;
  if (item.type === "custom_tool_call") return item.input;
  const { id, type, name, ...rest } = item;
  return JSON.stringify(rest, null, 2);
}

function conclude(text, isFailure) {
  $("outcome").textContent = text;
  $("outcome").className = isFailure ? "failure" : "";
}

function show(event, started) {
  if (event.item) {
    const block = blockOf(event.output_index, event.item);
    if (event.type === "response.output_item.done") block.textContent = finished(event.item);
  } else if (typeof event.delta === "string" && blocks.has(event.output_index)) {
    blocks.get(event.output_index).append(event.delta);
  } else if (event.type === "error") {
    conclude(event.message, true);
    return true;
  } else if (["response.completed", "response.incomplete", "response.failed"].includes(event.type)) {
    const { id, status, usage, error, incomplete_details: details } = event.response;
    if ($("to-stages")) $("to-stages").href = `live#response=${encodeURIComponent(id)}`;
    $("stages").hidden = false;
    const tokens = usage ? `, ${usage.input_tokens} tokens in, ${usage.output_tokens} out` : "";
    const why = error ? `: ${error.message.replace(/\.$/, "")}` : details ? `: ${details.reason}` : "";
    conclude(`${status}${why}${tokens}, ${((performance.now() - started) / 1000).toFixed(1)} s`, Boolean(error));
    return true;
  }
  return false;
}

/* The events of a stream: each is some lines, of which those with "data:" are read, and an empty one. */
async function* eventsOf(answer) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = answer.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const data = frame.split("\n").filter(line => line.startsWith("data: ")).map(line => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

/* The request, as a command and as a program; the key stays in a variable. */
const quoted = text => `'${text.replaceAll("'", "'\\''")}'`;
const literal = value =>
  value === null ? "None"
  : value === true ? "True"
  : value === false ? "False"
  : Array.isArray(value) ? `[${value.map(literal).join(", ")}]`
  : typeof value === "object" ? `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each)}`).join(", ")}}`
  : JSON.stringify(value);

/* The body of the request, and those of its parameters that were given as JSON. */
function asked() {
  const more = JSON.parse($("more").value.trim() || "{}");
  return { more, body: { model: $("model").value.trim() || undefined, input: $("input").value, store: false, ...more, stream: true } };
}

/* Shows the request as it would be sent now; JSON that is being typed leaves what is shown. */
function showAgain() {
  let request;
  try {
    request = asked();
  } catch {
    return;
  }
  const { more, body: { stream, ...body } } = request;
  const needsKey = !$("keyed").hidden;
  const key = needsKey ? ` \\\n    -H "Authorization: Bearer $OPENAI_API_KEY"` : "";
  $("as-curl").textContent = `curl -N ${quoted(`${base}/responses`)}${key} \\\n    -H 'Content-Type: application/json' \\\n    -d ${quoted(JSON.stringify({ ...body, stream }))}`;
  const { model = "", input, store } = body;
  const given = [["model", model], ["input", input], ["store", store], ...(Object.keys(more).length ? [["extra_body", more]] : [])];
  const client = needsKey ? `OpenAI(base_url=${literal(base)})` : `OpenAI(\n    base_url=${literal(base)},\n    api_key="none",\n)`;
  $("as-python").textContent = `from openai import OpenAI\n\nclient = ${client}\nresponse = client.responses.create(\n${given.map(([name, value]) => `    ${name}=${literal(value)},\n`).join("")})\nprint(response.output_text)`;
}

/* Copies the text of an element; a page over plain HTTP of another machine has no clipboard of its own. */
async function copy(button) {
  const source = $(button.dataset.copies);
  getSelection().selectAllChildren(source);
  if (navigator.clipboard) await navigator.clipboard.writeText(source.textContent);
  else document.execCommand("copy");
  button.firstChild.data = "Copied";
  setTimeout(() => (button.firstChild.data = "Copy"), 1500);
}

let aborting = null;

async function send() {
  const started = performance.now();
  let body;
  try {
    ({ body } = asked());
  } catch (error) {
    conclude(`The additional parameters are not JSON: ${error.message}`, true);
    return;
  }
  aborting = new AbortController();
  const options = { method: "POST", headers: { ...headers(), "Content-Type": "application/json" }, body: JSON.stringify(body), signal: aborting.signal };
  const answer = await fetch(`${base}/responses`, options);
  if (!answer.ok) {
    conclude(await refusal(answer), true);
    return;
  }
  let isOver = false;
  for await (const event of eventsOf(answer)) isOver = show(event, started) || isOver;
  if (!isOver) conclude("The stream broke off.", true);
}

async function run() {
  blocks.clear();
  $("items").replaceChildren();
  $("stages").hidden = true;
  conclude("…", false);
  $("send").disabled = !($("stop").disabled = false);
  try {
    await send();
  } catch (error) {
    if (error.name === "AbortError") conclude("Stopped.", false);
    else conclude(`The server cannot be reached: ${error.message}`, true);
  } finally {
    $("send").disabled = !($("stop").disabled = true);
  }
}

$("base").textContent = base;
$("form").addEventListener("input", showAgain);
for (const button of document.querySelectorAll("[data-copies]")) button.addEventListener("click", () => copy(button));
$("form").addEventListener("submit", event => {
  event.preventDefault();
  run();
});
$("input").addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
$("stop").addEventListener("click", () => aborting?.abort());
$("key").addEventListener("change", loadModels);
showAgain();
loadModels();
