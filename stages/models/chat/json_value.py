"""JSON that arrives in pieces: where a value ends, and what a string says."""

from __future__ import annotations

import json
import re

_IN_VALUE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class ValueEnd:
    """The machine: one per value.  It finds the end of objects, arrays and strings; other values have none.

    It takes what is no JSON as well, of which it finds an end or none.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.began = False
        """Whether anything but white space has come."""
        self.found = False

    def feed(self, text: str) -> int | None:
        """Take more text; the position in it behind the value's end, if it is there."""
        at = 0
        if not self.began:
            at = len(text) - len(text.lstrip())
            if at == len(text):
                return None
            self.began = True
            if text[at] not in '{["':
                self._depth = -1  # a bare word: nothing tells where it ends
        while self._depth >= 0 and at < len(text):
            at = self._step(text, at)
            if self.found:
                return at
        return None

    def _step(self, text: str, at: int) -> int:
        """Go on to the next character that means something."""
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        found = (_IN_STRING if self._in_string else _IN_VALUE).search(text, at)
        if found is None:
            return len(text)
        match found[0]:
            case "\\":
                self._is_escaped = True
            case '"':
                self._in_string = not self._in_string
            case "{" | "[":
                self._depth += 1
            case _:
                self._depth -= 1
        self.found = not self._in_string and not self._is_escaped and self._depth <= 0
        return found.end()


def unquoted(literal: str) -> str:
    """The text of a JSON string, or what stands between its quotes where it is none."""
    try:
        return str(json.loads(literal, strict=False))
    except ValueError:
        return literal[1:-1]
