"""Arguments of calls on their way to clients, which parse them while they come and take nothing but a JSON object."""

from __future__ import annotations

import re

DEEPEST = 100
"""The most levels of arguments: the parsers of clients have limits, too."""

_SPACE = re.compile(r"[ \t\n\r]*")
_CHARACTERS = re.compile(
    r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)
_HALF_AN_ESCAPE = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?)?"
)
_WORD = re.compile(r"[-+.\w]+")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_VALUE = '"{[s'
"""The first characters of values: of a string, an object or an array; ``s`` stands for a word."""


class ObjectReader:
    """State machine: passes on the text of a JSON object, as long as it is one.

    Whatever a model writes, what is passed on is the beginning of an object.
    """

    def __init__(self) -> None:
        self._held = ""
        self._expected = "{"
        """The first characters of the tokens that are right next, outside of strings."""
        self._ends: list[str] = []
        """The ends of the open objects and arrays."""
        self._is_in_string = False
        self._is_key = False
        self._is_broken = False

    def feed(self, text: str) -> str:
        """Take more text; return what may be passed on, without half an escape, a number or a word at its end."""
        if self._is_broken:
            return ""
        text, at = self._held + text, 0
        while at < len(text):
            after = self._string(text, at) if self._is_in_string else self._token(text, at)
            if after == at:
                break
            at = after
        self._held = text[at:]
        return text[:at]

    def _string(self, text: str, at: int) -> int:
        """Return the position after what is right of a string from ``at`` on."""
        at = _end(_CHARACTERS, text, at)
        if text.startswith('"', at):
            self._is_in_string = False
            self._expected = ":" if self._is_key else self._after_value
            return at + 1
        self._is_broken = at < len(text) and not _HALF_AN_ESCAPE.fullmatch(text, at)
        return at

    def _token(self, text: str, at: int) -> int:
        """Return the position after the space or the token that begins at ``at``; ``at`` if it is not whole."""
        if (after := max(_end(_SPACE, text, at), _end(_WORD, text, at))) == at:
            after = at + 1
        token = text[at:after]
        if token.isspace():
            return after
        if is_word := _WORD.match(token) is not None:
            if after == len(text):
                return at
            self._is_broken = not _SCALAR.fullmatch(token)
        self._is_broken |= ("s" if is_word else token) not in self._expected
        if self._is_broken:
            return at
        self._step(token)
        return after

    @property
    def _after_value(self) -> str:
        return f",{self._ends[-1]}" if self._ends else ""

    def _step(self, token: str) -> None:
        match token:
            case '"':
                self._is_in_string = True
            case "{":
                self._open("}", '"}')
            case "[":
                self._open("]", f"{_VALUE}]")
            case "}" | "]":
                self._ends.pop()
                self._expected = self._after_value
            case ":":
                self._is_key, self._expected = False, _VALUE
            case ",":
                self._is_key = self._ends[-1] == "}"
                self._expected = '"' if self._is_key else _VALUE
            case _:
                self._expected = self._after_value

    def _open(self, end: str, expected: str) -> None:
        self._ends.append(end)
        self._is_key, self._expected = end == "}", expected
        self._is_broken = len(self._ends) > DEEPEST


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of a match at a position, or the position if there is none."""
    return found.end() if (found := pattern.match(text, at)) else at
