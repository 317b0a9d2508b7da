/* A continuation beside the answer that it left. */

const MOST_BESIDE = 400; // tokens of each side

class Beside {
  show(take) {
    const { origin } = take ?? {};
    $("beside").hidden = !origin;
    if (!origin) return;
    const { old, count, from } = origin;
    const pair = [old.tokens.slice(count, count + MOST_BESIDE), take.tokens.slice(count - from, count - from + MOST_BESIDE)];
    const signature = `${takes.indexOf(take)} ${pair[0].length} ${pair[1].length} ${take.state}`;
    if (this.drawn === signature) return;
    const parted = pair[0].findIndex((token, at) => token.id !== pair[1][at]?.id);
    const same = parted < 0 ? Math.min(pair[0].length, pair[1].length) : parted;
    $("beside-title").textContent = `From token ${count.toLocaleString("en")} on`;
    const state = take.isOver ? "" : " so far";
    $("beside-is").textContent =
      parted < 0 && take.isOver && pair[0].length === pair[1].length ? "The same tokens." : `${same ? plural(same, "token") : "No token"} ${same < 2 ? "is" : "are"} the same${state}.`;
    pair.forEach((tokens, side) => {
      const list = tokens.map((token, at) => h("bdi", { className: `token ${token.channel}${token.mark ? " mark" : ""}${at === same ? " parted" : ""}`, textContent: shownToken(token.text) }));
      const more = (side ? take.tokens.length - count + from : old.tokens.length - count) - tokens.length;
      $(side ? "beside-new" : "beside-old").replaceChildren(...list, more > 0 ? h("span", { className: "quiet", textContent: ` … ${plural(more, "more token")}` }) : "");
    });
    this.drawn = signature;
  }
}
