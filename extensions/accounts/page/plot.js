/* A plot of stacked bars, one for each day; the tables beside it have the same numbers. */

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8;

function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/* The least number that is not below a value, and of which a quarter is short. */
function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999999) ?? 10 * power;
}

const HEIGHT = 280;
const FOOT = 24;
const HEAD = 12;
const LINES = 4;

class Plot {
  constructor(element, choose) {
    Object.assign(this, { element, choose, days: [], stacks: [], chosen: null });
    element.addEventListener("click", ({ clientX }) => this.choose(this.dayAt(clientX)));
    element.addEventListener("keydown", (event) => this.press(event));
    addEventListener("resize", () => this.draw());
  }

  show(days, stacks, format, chosen) {
    Object.assign(this, { days, stacks, format, chosen });
    this.draw();
  }

  total(place) {
    return this.stacks.reduce((sum, { values }) => sum + values[place], 0);
  }

  draw() {
    const { days, stacks, element } = this;
    const width = element.clientWidth - 24;
    if (!days.length || width <= 0) return;
    const top = roundUp(Math.max(...days.map((_, place) => this.total(place))));
    const labels = Array.from({ length: LINES + 1 }, (_, line) => this.format((top * line) / LINES));
    this.left = 8 + 7 * Math.max(...labels.map((label) => label.length));
    this.step = (width - this.left) / days.length;
    const y = (value) => HEIGHT - FOOT - (value / top) * (HEIGHT - FOOT - HEAD);
    const parts = labels.flatMap((label, line) => {
      const at = y((top * line) / LINES);
      return [s("line", { class: "grid", x1: this.left, x2: width, y1: at, y2: at }), s("text", { x: this.left - 8, y: at + 4, "text-anchor": "end" }, label)];
    });
    if (this.chosen !== null) parts.unshift(s("rect", { class: "chosen", x: this.x(this.chosen), y: HEAD, width: this.step, height: HEIGHT - FOOT - HEAD }));
    const between = Math.ceil(64 / this.step);
    days.forEach((day, place) => {
      let below = 0;
      for (const { values, colour, name } of stacks) {
        if (!(values[place] > 0)) continue;
        const [bottom, top] = [y(below), y(below + values[place])];
        const bar = { class: `bar-part s${colour}`, x: this.x(place) + this.step * 0.1, width: this.step * 0.8, y: top, height: bottom - top };
        parts.push(s("rect", bar, s("title", {}, `${day}, ${name}: ${this.format(values[place])}`)));
        below += values[place];
      }
      if ((days.length - 1 - place) % between === 0) parts.push(s("text", { x: this.x(place) + this.step / 2, y: HEIGHT - 6, "text-anchor": "middle" }, shortDay(day)));
    });
    element.replaceChildren(s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" }, ...parts));
    this.describe();
  }

  x(place) {
    return this.left + place * this.step;
  }

  describe() {
    const { element, chosen, days } = this;
    const all = days.reduce((sum, _, place) => sum + this.total(place), 0);
    element.setAttribute("aria-valuemin", "0");
    element.setAttribute("aria-valuemax", String(days.length));
    element.setAttribute("aria-valuenow", String(chosen === null ? 0 : chosen + 1));
    element.setAttribute("aria-valuetext", chosen === null ? `All days: ${this.format(all)}` : `${days[chosen]}: ${this.format(this.total(chosen))}`);
  }

  dayAt(clientX) {
    const at = clientX - this.element.getBoundingClientRect().left - 13 - this.left;
    const place = Math.floor(at / this.step);
    return place >= 0 && place < this.days.length && place !== this.chosen ? place : null;
  }

  press(event) {
    const last = this.days.length - 1;
    const moves = {
      ArrowLeft: () => (this.chosen === null ? last : Math.max(0, this.chosen - 1)),
      ArrowRight: () => (this.chosen === null ? 0 : Math.min(last, this.chosen + 1)),
      Home: () => 0,
      End: () => last,
      Escape: () => null,
    };
    if (!Object.hasOwn(moves, event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.choose(moves[event.key]());
  }
}

const shortDay = (day) => new Date(`${day}T00:00Z`).toLocaleDateString("en", { day: "numeric", month: "short", timeZone: "UTC" });
