/* The server: its routes for the operator, and the server-sent events of a stream. */

const ask = asking("live/");

const askJson = async (path) => (await ask(path)).json();

const watch = (body, signal) =>
  ask("watch", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });

const recording = (name, signal) => ask(`recordings/${encodeURIComponent(name)}`, { signal });

/* Calls `take(kind, data)` for each event of a stream, which may be refused after a long wait. */
async function readEvents(answer, take) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = answer.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("event: ")) continue; // a comment, which keeps the connection open
      const end = frame.indexOf("\n");
      const [kind, data] = [frame.slice(7, end), JSON.parse(frame.slice(end + 7))];
      if (kind === "error") throw new Refused(answer.status, data.message, data.param);
      take(kind, data);
    }
  }
}
