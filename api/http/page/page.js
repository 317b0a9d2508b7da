"use strict";
/* What all pages share.  Text is only ever put in as text: no script uses innerHTML. */

const $ = (id) => document.getElementById(id);

/** Create an element with properties, attributes (names with a dash, "role" and "for") and children. */
function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.includes("-") || name === "role" || name === "for" || !(name in element)) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`);

/* Light or dark: as the system has it, until the reader chooses. */
const theme = {
  system: matchMedia("(prefers-color-scheme: dark)"),
  chosen: null,
  apply() {
    document.documentElement.dataset.theme = this.chosen ?? (this.system.matches ? "dark" : "light");
    document.dispatchEvent(new Event("theme"));
  },
  toggle() {
    this.chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    this.apply();
  },
};
theme.system.addEventListener("change", () => theme.apply());
theme.apply();
$("theme").addEventListener("click", () => theme.toggle());
