"use strict";
// Recorded data is only ever inserted as text, never as markup: this file does not use innerHTML.

const layout = JSON.parse(document.getElementById("layout").textContent);
const $ = (id) => document.getElementById(id);

/** Create an element with properties, attributes (names with a dash, "role" and "for") and children. */
function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const count = (number, one) => `${number.toLocaleString("en")} ${one}${number === 1 ? "" : "s"}`;

const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const followSystem = () => (root.dataset.theme = prefersDark.matches ? "dark" : "light");

function toggleTheme() {
  prefersDark.removeEventListener("change", followSystem);
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
}
