"""The text of tools that take one: chat models write it as the one argument of a function, in JSON."""

from __future__ import annotations

import re

from penstock.stages.models.chat.json_value import unquoted

_HEAD = re.compile(r'\s*\{\s*("(?:[^"\\]|\\.)*")\s*:\s*"')
_BEGINNING = re.compile(r'\s*(?:\{\s*(?:"(?:[^"\\]|\\.)*(?:\\|"\s*(?::\s*)?)?)?)?')
"""What may yet become a head."""
_LONGEST_HEAD = 1_024
"""Characters, which are read again with each piece: names are shorter."""
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
    """The machine: one per call.  ``name`` is that of the argument; what is no object with it is passed on as it is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._held_back = ""
        self._place = "ahead"

    def feed(self, text: str) -> str:
        """Take more JSON, give the text that became clear by it."""
        match self._place:
            case "ahead":
                return self._begin(self._held_back + text)
            case "in":
                return self._read(self._held_back + text)
            case "raw":
                return text
            case _:
                return ""

    def flush(self, *, cut: bool = False) -> str:
        """What was held back until the end; of what was ``cut`` nobody knows what it would have become."""
        if cut:
            return ""
        if self._place == "in":
            return _REPLACEMENT if self._held_back else ""
        return self._held_back

    def _begin(self, text: str) -> str:
        head = _HEAD.match(text)
        if head and unquoted(head[1]) == self._name:
            self._place = "in"
            return self._read(text[head.end() :])
        if head is None and len(text) <= _LONGEST_HEAD and _BEGINNING.fullmatch(text):
            self._held_back = text
            return ""
        self._place, self._held_back = "raw", ""
        return text

    def _read(self, text: str) -> str:
        pieces = []
        at = 0
        while at < len(text):
            if _PAIR_BEGINS.fullmatch(text, at) or _ESCAPE_BEGINS.fullmatch(text, at):
                break
            found = _STEP.match(text, at)
            if found is None:  # no escape that JSON knows
                pieces.append(text[at])
                at += 1
                continue
            at = found.end()
            if found["end"]:
                self._place = "behind"
                break
            pieces.append(_meant(found))
        self._held_back = text[at:] if self._place == "in" else ""
        return "".join(pieces)


def _meant(found: re.Match[str]) -> str:
    match found.lastgroup:
        case "text":
            return found[0]
        case "low":
            return chr(0x10000 + ((int(found["high"], 16) - 0xD800) << 10) + int(found["low"], 16) - 0xDC00)
        case "code":
            code = int(found["code"], 16)
            return _REPLACEMENT if 0xD800 <= code < 0xE000 else chr(code)
        case _:
            return _LETTERS.get(found["letter"], found["letter"])
