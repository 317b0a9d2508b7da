"""Unwrap the input of tools that take plain text: chat models write it as a function's only argument, in JSON."""

from __future__ import annotations

import re

from penstock.stages.models.chat.json_value import ValueEnd, unquoted
from penstock.stages.parse.only_text import OnlyText

_HEAD = re.compile(r'\s*\{\s*("(?:[^"\\]|\\.)*")\s*:\s*(?=[^\s,}\]])')
_BEGINNING = re.compile(r'\s*(?:\{\s*(?:"(?:[^"\\]|\\.)*(?:\\|"\s*(?::\s*)?)?)?)?')
"""A possible beginning of a head."""
_SCALAR = re.compile(r"[^\s,{}\[\]\"]*")
"""A number or a word, as far as it has arrived."""
_HEAD_CHARACTERS = 1_024
"""Characters.  A possible head is matched again with each piece, so its length is limited; real heads are shorter."""
_STEP = re.compile(
    r'(?P<text>[^"\\]+)'
    r'|(?P<end>")'
    r"|\\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\u(?P<code>[0-9a-fA-F]{4})"
    r"|\\(?P<letter>[^u])",
    re.DOTALL,
)
_PAIR_BEGINS = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?")
_ESCAPE_BEGINS = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_LETTERS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Unwrapped:
    """Extracts the value of the argument ``name`` from the JSON arguments of one call.

    A value that is no string is extracted as its JSON, as some of vLLM's parsers take a text that is JSON for one.
    Arguments that are not an object with this argument first are read as `OnlyText`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._value = ValueEnd()
        """The end of a value that is an object or a list."""
        self._held_back = ""
        self._other = OnlyText(is_json=True)
        self._place = "before"
        self.is_repaired = False
        """True if the text was that of another argument, or no argument at all."""

    def feed(self, text: str) -> str:
        """Take more JSON and return the text that it completes."""
        match self._place:
            case "before":
                return self._begin(self._held_back + text)
            case "in":
                return self._read(self._held_back + text)
            case "object":
                return self._read_object(text)
            case "scalar":
                return self._read_scalar(text)
            case "other":
                return self._other.feed(text)
            case _:
                return ""

    def flush(self, *, cut: bool = False) -> str:
        """Return the text still held back; if generation was ``cut``, nothing whose meaning is unknown."""
        if self._place == "other":
            rest, self.is_repaired = self._other.end()
            return rest
        if cut:
            return ""
        if self._place == "in":
            return _REPLACEMENT if self._held_back else ""
        return self._held_back

    def _begin(self, text: str) -> str:
        head = _HEAD.match(text)
        if head and unquoted(head[1]) == self._name:
            self._held_back, value = "", text[head.end() :]
            self._place = {'"': "in", "{": "object", "[": "object"}.get(value[0], "scalar")
            match self._place:
                case "in":
                    return self._read(value[1:])
                case "object":
                    return self._read_object(value)
                case _:
                    return self._read_scalar(value)
        if head is None and len(text) <= _HEAD_CHARACTERS and _BEGINNING.fullmatch(text):
            self._held_back = text
            return ""
        self._place, self._held_back = "other", ""
        return self._other.feed(text)

    def _read_object(self, text: str) -> str:
        end = self._value.feed(text)
        if end is not None:
            self._place = "after"
        return text[:end]

    def _read_scalar(self, text: str) -> str:
        scalar = _SCALAR.match(text)
        assert scalar
        if scalar.end() < len(text):
            self._place = "after"
        return scalar[0]

    def _read(self, text: str) -> str:
        pieces = []
        at = 0
        while at < len(text):
            if _PAIR_BEGINS.fullmatch(text, at) or _ESCAPE_BEGINS.fullmatch(text, at):
                break  # the next piece may complete the escape, or bring the other half of a surrogate pair
            step = _STEP.match(text, at)
            if step is None:  # not an escape of JSON
                pieces.append(text[at])
                at += 1
                continue
            at = step.end()
            if step["end"]:
                self._place = "after"
                break
            pieces.append(_meant(step))
        self._held_back = text[at:] if self._place == "in" else ""
        return "".join(pieces)


def _meant(step: re.Match[str]) -> str:
    match step.lastgroup:
        case "text":
            return step[0]
        case "low":
            return chr(0x10000 + ((int(step["high"], 16) - 0xD800) << 10) + int(step["low"], 16) - 0xDC00)
        case "code":
            code = int(step["code"], 16)
            return _REPLACEMENT if 0xD800 <= code < 0xE000 else chr(code)
        case _:
            return _LETTERS.get(step["letter"], step["letter"])
