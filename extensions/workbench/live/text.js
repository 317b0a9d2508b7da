/* Texts as they are shown. */

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
