/* The slider over the tokens of a take, with a strip of their channels. */

class Slider {
  count = 0;
  total = 0;
  follows = true;

  constructor(moved) {
    this.moved = moved;
    this.range = $("position");
    this.range.addEventListener("input", () => this.go(Number(this.range.value)));
    const steps = { first: -Infinity, back: -1, forward: 1, last: Infinity };
    for (const [id, by] of Object.entries(steps)) $(id).addEventListener("click", () => this.step(by));
    document.addEventListener("theme", () => this.update(this.take));
  }

  step(by) {
    this.go(Math.min(Math.max(this.count + by, 0), this.total));
  }

  go(count) {
    this.count = count;
    this.follows = count >= this.total;
    this.moved();
  }

  update(take) {
    this.take = take;
    this.total = take?.tokens.length ?? 0;
    if (this.follows) this.count = this.total;
    const { count, total, range } = this;
    range.max = total;
    range.value = count;
    const token = count ? take.tokens[count - 1] : null;
    const at = token?.at === undefined || token === null ? "" : `, ${seconds(token.at)}`;
    range.setAttribute("aria-valuetext", token ? `token ${count} of ${total}: ${shownToken(token.text).trim() || "white space"}` : `before the first of ${plural(total, "token")}`);
    $("place").textContent = total ? `${count.toLocaleString("en")} of ${plural(total, "token")}${at}` : "No tokens";
    $("follows").hidden = !(take && !take.isOver && this.follows);
    for (const id of ["first", "back"]) $(id).disabled = !count;
    for (const id of ["forward", "last"]) $(id).disabled = count >= total;
    this.paint(take);
  }

  paint(take) {
    const canvas = $("strip");
    const width = canvas.clientWidth;
    if (!width) return;
    const scale = devicePixelRatio;
    const signature = [take && takes.indexOf(take), this.count, this.total, width, take?.state, document.documentElement.dataset.theme].join();
    if (this.drawn === signature) return;
    this.drawn = signature;
    canvas.width = width * scale;
    canvas.height = canvas.clientHeight * scale;
    const context = canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const colours = Object.fromEntries(CHANNELS.map((channel) => [channel, style.getPropertyValue(`--${channel}`)]));
    const { tokens } = take ?? { tokens: [] };
    for (let x = 0; x < canvas.width && tokens.length; x++) {
      const token = tokens[Math.floor((x * tokens.length) / canvas.width)];
      const number = (x * tokens.length) / canvas.width;
      context.globalAlpha = number < this.count ? (token.channel === "markup" ? 0.55 : 1) : 0.22;
      context.fillStyle = colours[token.channel];
      context.fillRect(x, token.channel === "markup" ? canvas.height * 0.4 : 0, 1, canvas.height);
    }
  }
}
