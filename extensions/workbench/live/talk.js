/* Talking to the model: the thread of messages, and what a new request has of it. */

const OF_CLIENT = new Set(["function_call", "custom_tool_call", "mcp_approval_request", "local_shell_call"]);

class Thread {
  items = [];

  /* The body of the next request: what was said before, without calls that nobody has answered, and the new message. */
  body(text) {
    const more = JSON.parse($("more").value.trim() || "{}");
    const input = [...this.items, { role: "user", content: text }];
    return { model: $("model").value || undefined, input, ...more, store: false };
  }

  begin(text, take) {
    this.say("user", text);
    const answer = this.say("assistant", "");
    answer.append(h("em", { textContent: "…" }));
    take.said = { answer, text };
  }

  say(role, text) {
    $("no-thread").hidden = true;
    const words = h("p", { textContent: text, dir: "auto" });
    $("thread").append(h("div", { className: `said ${role}` }, h("span", { className: "unseen", textContent: role === "user" ? "You:" : "The model:" }), words));
    return words;
  }

  /* Shows the messages of a take, whose problem is told beside, and keeps them for the next request once it has ended well. */
  update(take) {
    if (!take.said) return;
    const { answer, text } = take.said;
    const rows = take.rows.filter((row) => row.channel === "final" && row.length);
    const length = rows.reduce((sum, row) => sum + row.length, 0);
    if ((take.said.length ?? 0) !== length) {
      const words = rows.map((row) => row.text).join("\n\n");
      answer.textContent = words.slice(0, 20_000).replace(UNSEEN, named);
      answer.classList.toggle("code", isCode(words));
      take.said.length = length;
    }
    if (!take.isOver) return;
    if (!length) answer.replaceChildren(h("em", { textContent: take.response && !take.problem ? "No message: see its items." : take.state }));
    if (take.response?.status === "completed") {
      this.items.push({ role: "user", content: text }, ...take.response.output.filter((item) => !OF_CLIENT.has(item.type)));
    }
    take.said = null;
  }

  clear() {
    this.items = [];
    $("thread").replaceChildren();
    $("no-thread").hidden = false;
  }
}
