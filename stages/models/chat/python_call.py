"""One call written in Python, ``name(key=value, ...)``, translated into JSON while it arrives."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.stages.models.chat.call_readers import MOST_HEAD_CHARACTERS, CallSite, unexplained
from penstock.stages.models.chat.json_value import to_json
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, Piece

_NAME = re.compile(r"([A-Za-z_][\w.-]*)\s*\(")
_PART_OF_NAME = re.compile(r"[A-Za-z_][\w.-]*\s*")
_KEY = re.compile(r"[\s,]*([A-Za-z_]\w*)\s*=\s*(?=\S)")
_PART_OF_KEY = re.compile(r"[\s,]*(?:[A-Za-z_]\w*\s*(?:=\s*)?)?")
_CALL_END = re.compile(r"[\s,]*\)")
_SCALAR = re.compile(r"[^,)]*(?=[,)])")
_QUOTE = re.compile(r"'''|\"\"\"|'|\"")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\}|[0-7]{1,3}|\n|.)", re.DOTALL)
_PART_OF_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|N(?:\{[^}]{0,80})?)?\Z")
_AFTER_STRING = re.compile(r"\s*(?:,\s*(?:[A-Za-z_]\w*\s*=|\))|\)[\s,\]<]|\]\s*<)")
_PART_AFTER_STRING = re.compile(r"\s*(?:,\s*(?:[A-Za-z_]\w*\s*)?|\)|\]\s*)?")
_BRACKETS = re.compile(r"[\[{(\])}]|'''|\"\"\"|'|\"")
_NO_WORDS = frozenset("\"'()[]{}<>=")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


@dataclass(frozen=True)
class PythonCall:
    """A Python call with keyword arguments."""

    begins: tuple[str, ...] = ()
    is_listed: bool = True
    begins_with_name: bool = False

    def may_begin(self, text: str) -> bool | None:
        """True at a letter."""
        return text[:1].isalpha() or text[:1] == "_"

    def __call__(self, site: CallSite) -> PythonCallReader:
        """Return a reader of one call."""
        return PythonCallReader(site)


class PythonCallReader:
    """Reads one call; it is announced once its name is known to be that of a call.

    Strings stream.  A quote ends its string only before another argument or the end of the call, as models forget to
    escape quotes.
    """

    def __init__(self, site: CallSite) -> None:
        self._site = site
        self.text = ""
        self.is_call = self.is_done = self.is_broken = False
        self._separator = "{"
        self._value: _String | _Brackets | None = None
        self._has_key = False

    @property
    def may_be_call(self) -> bool:
        return self._site.is_marked or any(name.startswith(self.text.strip()) for name in self._site.parameters)

    def feed(self, text: str) -> Generator[Piece, None, int]:
        at, before = 0, -1
        while at != before and at < len(text) and not self.is_done:
            before = at
            if not self.is_call:
                at = yield from self._read_name(text, at)
            elif not self._has_key:
                at = yield from self._read_key(text, at)
            else:
                at = yield from self._read_value(text, at)
        if not self.is_call:
            self.text += text[:at]
        return at

    def end(self, rest: str, *, marked: bool) -> Iterator[Piece]:
        rest = rest.rstrip(",)] \n")
        if isinstance(self._value, _String) and rest.strip() == self._value.quote:
            yield ArgumentsPiece('"}')
        elif self._value is None and not self._has_key and self._separator != "{" and not rest.strip():
            yield ArgumentsPiece("}")
        else:
            self.is_broken = True
            yield from unexplained(rest)

    def _read_name(self, text: str, at: int) -> Generator[Piece, None, int]:
        if found := _NAME.match(text, at):
            if self._site.may_be_called(found[1]):
                self.is_call = True
                yield CallPiece(found[1])
                return found.end()
            self.is_done = True
        elif len(text) - at > MOST_HEAD_CHARACTERS or not _PART_OF_NAME.fullmatch(text, at):
            self.is_done = True
        return at

    def _read_key(self, text: str, at: int) -> Generator[Piece, None, int]:
        if end := _CALL_END.match(text, at):
            self.is_done = True
            yield ArgumentsPiece("{}" if self._separator == "{" else "}")
            return end.end()
        if found := _KEY.match(text, at):
            yield ArgumentsPiece(f"{self._separator}{json.dumps(found[1])}: ")
            self._separator, self._has_key = ", ", True
            return found.end()
        if len(text) - at > MOST_HEAD_CHARACTERS or not _PART_OF_KEY.fullmatch(text, at):
            self.is_done = self.is_broken = True
        return at

    def _read_value(self, text: str, at: int) -> Generator[Piece, None, int]:
        if self._value is None:
            if text[at] in "[{(":
                self._value = _Brackets()
            elif quote := _QUOTE.match(text, at):
                if text[at:] in ("'", '"', "''", '""'):  # a string may begin, or end, or a triple quote begin
                    return at
                self._value = _String(quote[0])
                yield ArgumentsPiece('"')
                return quote.end()
            else:
                return (yield from self._read_scalar(text, at))
        length, translated = self._value.feed(text[at:])
        if translated is None:
            self.is_done = self.is_broken = True
            yield from unexplained(self._value.text + text[at : at + length])
            return at + length
        if translated:
            yield ArgumentsPiece(translated)
        if self._value.is_done:
            self._value, self._has_key = None, False
        return at + length

    def _read_scalar(self, text: str, at: int) -> Generator[Piece, None, int]:
        if found := _SCALAR.match(text, at):
            value = _scalar(found[0].strip())
            if value is None:
                self.is_done = self.is_broken = True
                return at
            self._has_key = False
            yield ArgumentsPiece(value)
            return found.end()
        self.is_done = self.is_broken = len(text) - at > MOST_HEAD_CHARACTERS
        return at


class _String:
    """Translates a string without its first quote; its last one becomes that of JSON."""

    def __init__(self, quote: str) -> None:
        self.quote = quote
        self.text = ""
        self._marks = re.compile(f"{_ESCAPE.pattern}|{quote}", re.DOTALL)
        self.is_done = False

    def feed(self, text: str) -> tuple[int, str]:
        """Return the number of characters that are read, and their JSON."""
        at = 0
        for found in self._marks.finditer(text):
            at = found.end()
            if found[0] != self.quote:
                if _PART_OF_ESCAPE.fullmatch(text, found.start()):
                    return found.start(), _escaped(text[: found.start()])
                continue
            if _AFTER_STRING.match(text, at):
                self.is_done = True
                return at, _escaped(text[: found.start()]) + '"'
            if len(text) - at < MOST_HEAD_CHARACTERS and _PART_AFTER_STRING.fullmatch(text, at):
                return found.start(), _escaped(text[: found.start()])
        end = len(text) - _beginning(text[at:], self.quote)
        return end, _escaped(text[:end])


class _Brackets:
    """Reads a list, a tuple, a set or a dict, and translates it as a whole."""

    def __init__(self) -> None:
        self.text = ""
        self.is_done = False
        self._depth = 0
        self._quote = ""

    def feed(self, text: str) -> tuple[int, str | None]:
        """Return the number of characters that are read, and their JSON if the container ends with them.

        The JSON is None if the container cannot be read.
        """
        at = 0
        while at < len(text):
            if self._quote:
                found = re.compile(r"\\(?:.|\Z)|" + self._quote, re.DOTALL).search(text, at)
                if found is None:
                    break
                if found[0] == "\\":  # the escaped character has not come
                    self.text += text[: found.start()]
                    return found.start(), ""
                at = found.end()
                self._quote = "" if found[0] == self._quote else self._quote
                continue
            found = _BRACKETS.search(text, at)
            if found is None:
                break
            at = found.end()
            if found[0] in "[{(":
                self._depth += 1
            elif found[0] in "]})":
                self._depth -= 1
                if not self._depth:
                    self.is_done = True
                    return at, _json(self.text + text[:at])
            else:
                self._quote = found[0]
        self.text += text
        return len(text), ""


def _beginning(text: str, quote: str) -> int:
    """Return the length of the end of ``text`` that may begin an escape or the quote."""
    starts = ("\\", *(quote[:length] for length in range(len(quote) - 1, 0, -1)))
    return next((len(start) for start in starts if text.endswith(start)), 0)


def _escaped(text: str) -> str:
    """Return the inside of a Python string as that of a JSON string."""
    return to_json(_ESCAPE.sub(_unescaped, text))[1:-1]


def _unescaped(escape: re.Match[str]) -> str:
    try:
        return str(ast.literal_eval(f'"{escape[0]}"')) if escape[1] not in "\"'" else escape[1]
    except (SyntaxError, ValueError):
        return escape[0]


def _json(source: str) -> str | None:
    """Return a Python literal as JSON; None for text that is no literal."""
    try:
        tree = ast.parse(source, mode="eval").body
        return to_json(_evaluated(tree))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return _number(source)


def _scalar(source: str) -> str | None:
    """Return a value that is no container as JSON: a literal, or words as a string; None for anything else."""
    literal = _json(source)
    if literal is None and source and _NO_WORDS.isdisjoint(source):
        return to_json(source)
    return literal


def _number(source: str) -> str | None:
    """Return a number with leading zeros, such as the month ``07``, as JSON."""
    return source.lstrip("0") if re.fullmatch(r"0+[1-9]\d*", source) else None


def _evaluated(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.Name(name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.List(items) | ast.Tuple(items) | ast.Set(items):
            return [_evaluated(item) for item in items]
        case ast.Dict(keys, values):
            return {str(_evaluated(key)): _evaluated(value) for key, value in zip(keys, values, strict=True) if key}
        case _:
            raise ValueError("no literal")
