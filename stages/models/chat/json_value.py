"""JSON that arrives in pieces: find the end of a value, and decode strings."""

from __future__ import annotations

import json
import re

import msgspec

_IN_VALUE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL)
_IN_STRING = re.compile(r'["\\]')


class ValueEnd:
    """Finds the end of one JSON object, array or string as its text arrives.

    Numbers and words have no end that could be recognised, so none is found for them.  Invalid JSON raises no error;
    only quotes, escapes and brackets are looked at.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.began = False
        """True once anything but white space has arrived."""
        self.found = False

    def feed(self, text: str) -> int | None:
        """Take more text; return the position after the value's end, or None if the value has not ended."""
        at = 0
        if not self.began:
            at = len(text) - len(text.lstrip())
            if at == len(text):
                return None
            self.began = True
            if text[at] not in '{["':
                self._depth = -1  # a number or a word: its end cannot be recognised
        while self._depth >= 0 and at < len(text):
            at = self._step(text, at)
            if self.found:
                return at
        return None

    def _step(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        next_match = (_IN_STRING if self._in_string else _IN_VALUE).search(text, at)
        if next_match is None:
            return len(text)
        match next_match[0]:
            case "\\":
                self._is_escaped = True
            case '"':
                self._in_string = not self._in_string
            case "{" | "[":
                self._depth += 1
            case _:
                self._depth -= 1
        self.found = not self._in_string and not self._is_escaped and self._depth <= 0
        return next_match.end()


def unquoted(literal: str) -> str:
    """Decode a JSON string; if it is invalid, return the text between its quotes as it is.

    A lone surrogate, which JSON can spell but UTF-8 cannot, becomes ``?``.
    """
    try:
        return str(json.loads(literal, strict=False)).encode(errors="replace").decode()
    except ValueError:
        return literal[1:-1]


def to_json(value: object) -> str:
    """Return a value as JSON; half of a surrogate pair, which UTF-8 cannot spell, is escaped."""
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()


def is_json_object(text: str) -> bool:
    """True if ``text`` is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):  # the last for a lone surrogate
        return False


def is_json_string(text: str) -> bool:
    """True if ``text`` is a JSON string."""
    try:
        return isinstance(json.loads(text, strict=False), str)
    except ValueError:
        return False


def missing_brackets(text: str) -> str:
    """Return the brackets that end the JSON value that ``text`` begins; empty within a string."""
    open_brackets, at = list[str](), 0
    while found := _IN_VALUE.search(text, at):
        at = found.end()
        if found[0] == '"':
            end = _STRING_END.match(text, at)
            if end is None:
                return ""
            at = end.end()
        elif found[0] in "{[":
            open_brackets.append("}" if found[0] == "{" else "]")
        elif not open_brackets or open_brackets.pop() != found[0]:
            return ""
    return "".join(reversed(open_brackets))
