"use strict";
/* Elements: text is only ever put in as text. */

const $ = (id) => document.getElementById(id);

function h(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in element && !key.startsWith("aria")) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

const LONGEST_TOKEN = 400;
const LONGEST_TEXT = 200_000;

/* Characters that would not be seen, or would change the order of others, are shown by their names. */
const UNSEEN = /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

const named = (character) => {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  return `⟨${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
};

/* Whether a text begins as a JSON object or list does. */
const isCode = (text) => /^\s*(\{\s*["}]|\[\s*["{[\]])/.test(text);

function shownToken(text) {
  const short = text.length > LONGEST_TOKEN ? `${text.slice(0, LONGEST_TOKEN)}…` : text;
  return short.replace(UNSEEN, named).replaceAll("\n", "↵\n");
}

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`);

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
