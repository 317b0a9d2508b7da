"""Calls as ``call:NAME{key:value,...}`` with a mark for the quotes of texts, translated into JSON.

Models leave out the word ``call``, and write the quotes of JSON instead of the mark.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cache

from penstock.stages.models.chat.argument_values import ArgumentSchema, as_json, quoted
from penstock.stages.models.chat.call_readers import MOST_HEAD_CHARACTERS, CallSite, unexplained
from penstock.stages.models.chat.json_value import ValueEnd, is_json_string, unquoted
from penstock.stages.models.chat.marks import Marks, begins_with
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, Piece

_HEAD = re.compile(r"(?:call)?:\s*([^\s{}:,]+)\s*\{")
_JSON_STRING = r'"(?:[^"\\]|\\.)*"'
_STRING = re.compile(_JSON_STRING, re.DOTALL)
_IN_STRING = re.compile(r'\\(?:.|\Z)|"', re.DOTALL)
_END = re.compile(r"[\s,]*\}")
_SCALAR = re.compile(r"[^,{}\[\]\"<>]*(?=[,}\]])")
_PART_OF_SCALAR = re.compile(r"[^,{}\[\]\"<>]*")
_AFTER_TEXT = re.compile(r"\s*[,}\]]")
_MOST_LEVELS = 64


@cache
def _keys(quote: str) -> re.Pattern[str]:
    """Return the pattern of a key: in a pair of quotes, in those of JSON, or bare."""
    mark = re.escape(quote)
    return re.compile(
        rf"[\s,]*({mark}[^{{}}\[\],:\n]*?{mark}|{_JSON_STRING}|[^\s{{}}\[\],:\"<>][^{{}}\[\],:\n\"<>]*?)\s*:\s*"
    )


@dataclass(frozen=True)
class KeyedCall:
    """A call of this form; ``quote`` is the mark around texts."""

    quote: str
    begins: tuple[str, ...] = ()
    is_listed: bool = False
    begins_with_name: bool = False

    def may_begin(self, text: str) -> bool | None:
        """True at the word that begins a call, or at the colon after it."""
        return text.startswith(":") or begins_with(text, "call:")

    def __call__(self, site: CallSite) -> KeyedCallReader:
        """Return a reader of one call."""
        return KeyedCallReader(site, self.quote)


class KeyedCallReader:
    """Reads one call.  Texts stream; objects and lists are translated at their end."""

    may_be_call = True

    def __init__(self, site: CallSite, quote: str) -> None:
        self._site = site
        self._quote = quote
        self._quotes = Marks((quote,))
        self.text = ""
        self.is_call = self.is_done = self.is_broken = False
        self._schema = ArgumentSchema()
        self._separator = "{"
        self._value: ArgumentSchema | None = None
        """The schema of the value that is being read."""
        self._is_text = False
        self._collected: list[str] | None = None
        """The parts of a text that stands for a number or the like; None if it streams."""
        self._whole: _Nested | _JsonString | None = None
        """The reader of a value that is translated as a whole."""

    def feed(self, text: str) -> Generator[Piece, None, int]:
        at, before = 0, None
        while before != (before := (at, self._value, self._whole)) and not self.is_done:
            if not self.is_call:
                at = yield from self._read_head(text)
            elif self._is_text:
                at = yield from self._read_text(text, at)
            elif self._value is None:
                at = yield from self._read_key(text, at)
            else:
                at = yield from self._read_value(text, at, self._value)
        return at

    def end(self, rest: str, *, marked: bool) -> Iterator[Piece]:
        if self._is_text and rest.startswith(self._quote) and not rest.removeprefix(self._quote).strip():
            yield from self._end_text()
            rest = ""
        if self.is_call and self._value is None and not rest.strip():
            yield from [] if self._separator == "{" else [ArgumentsPiece("}")]
        elif self.is_call:
            self.is_broken = True
            yield from unexplained(rest)

    def _break(self) -> None:
        self.is_done = self.is_broken = True

    def _read_head(self, text: str) -> Generator[Piece, None, int]:
        found = _HEAD.match(text)
        if found is None or not self._site.may_be_called(found[1]):
            self.is_done = found is not None or len(text) > MOST_HEAD_CHARACTERS
            return 0
        self.is_call, self._schema = True, self._site.schema(found[1])
        yield CallPiece(found[1])
        return found.end()

    def _read_key(self, text: str, at: int) -> Generator[Piece, None, int]:
        if end := _END.match(text, at):
            self.is_done = True
            yield ArgumentsPiece("{}" if self._separator == "{" else "}")
            return end.end()
        if found := _keys(self._quote).match(text, at):
            key = _name(found[1], self._quote)
            self._value = self._schema.of_property(key)
            yield ArgumentsPiece(f"{self._separator}{quoted(key)}: ")
            self._separator = ", "
            return found.end()
        if len(text) - at > MOST_HEAD_CHARACTERS:
            self._break()
        return at

    def _read_value(self, text: str, at: int, schema: ArgumentSchema) -> Generator[Piece, None, int]:
        if self._whole:
            return (yield from self._read_whole(self._whole, text, at, schema))
        at = len(text) - len(text[at:].lstrip())
        if at == len(text):
            return at
        if text.startswith(self._quote, at):
            self._is_text = True
            self._collected = [] if schema.types and "string" not in schema.types else None
            yield from [] if self._collected is not None else [ArgumentsPiece('"')]
            return at + len(self._quote)
        if self._quote.startswith(text[at:]):
            return at
        if text[at] == '"':
            self._whole = _JsonString()
        elif text[at] in "{[":
            self._whole = _Nested(self._quote)
        elif found := _SCALAR.match(text, at):
            self._value = None
            yield ArgumentsPiece(as_json(found[0].strip(), schema))
            return found.end()
        elif len(text) - at > MOST_HEAD_CHARACTERS or not _PART_OF_SCALAR.fullmatch(text, at):
            self._break()
        return at

    def _read_whole(
        self, value: _Nested | _JsonString, text: str, at: int, schema: ArgumentSchema
    ) -> Generator[Piece, None, int]:
        """Read a value that is translated at its end, behind which another key or the end of the object has to come."""
        if not value.is_done:
            at += value.feed(text[at:])
        if value.is_done and text[at:].strip():
            found = value.as_json(schema) if _AFTER_TEXT.match(text, at) else None
            if found is None:
                self._break()
                return at
            yield ArgumentsPiece(found)
            self._whole, self._value = None, None
        return at

    def _read_text(self, text: str, at: int) -> Generator[Piece, None, int]:
        """Read a text: a quote ends it only before the next key or the end of the object."""
        while found := self._quotes.search(text, at):
            yield from self._take(text[at : found.start()])
            if not text[found.end() :].strip() and len(text) - found.end() < MOST_HEAD_CHARACTERS:
                return found.start()
            if _AFTER_TEXT.match(text, found.end()):
                yield from self._end_text()
                return found.end()
            yield from self._take(found[0])
            at = found.end()
        end = max(at, len(text) - self._quotes.overlap(text))
        yield from self._take(text[at:end])
        return end

    def _take(self, text: str) -> Iterator[Piece]:
        if self._collected is not None:
            self._collected.append(text)
        elif text:
            yield ArgumentsPiece(quoted(text)[1:-1])

    def _end_text(self) -> Iterator[Piece]:
        assert self._value
        yield ArgumentsPiece('"' if self._collected is None else as_json("".join(self._collected), self._value))
        self._is_text, self._value = False, None


class _JsonString:
    """Collects a string of JSON."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._end = ValueEnd()

    @property
    def is_done(self) -> bool:
        return self._end.found

    def feed(self, text: str) -> int:
        """Take more text, and return the number of characters that are the string's."""
        length = self._end.feed(text)
        self._parts.append(text[:length])
        return len(text) if length is None else length

    def as_json(self, schema: ArgumentSchema) -> str | None:
        """Return the value as JSON; None if it is no string."""
        return _text_as_json("".join(self._parts), schema)


class _Nested:
    """Collects an object or a list up to its end."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._marks = Marks((quote, *'"{}[]'))
        self._parts: list[str] = []
        self._depth = 0
        self._is_text = False
        self._in_string = False
        self.is_done = False

    def feed(self, text: str) -> int:
        at = 0
        while at < len(text):
            if self._in_string:
                found = _IN_STRING.search(text, at)
                if found is None or found[0] == "\\":
                    at = found.start() if found else len(text)
                    break
                at, self._in_string = found.end(), found[0] != '"'
                continue
            found = self._marks.search(text, at)
            if found is None:
                at = max(at, len(text) - self._marks.overlap(text))
                break
            at = found.end()
            if found[0] == self._quote:
                self._is_text = not self._is_text
            elif found[0] == '"' and not self._is_text:
                self._in_string = True
            elif not self._is_text and found[0] != '"':
                self._depth += 1 if found[0] in "{[" else -1
            if not self._depth:
                self.is_done = True
                break
        self._parts.append(text[:at])
        return at

    def as_json(self, schema: ArgumentSchema) -> str | None:
        """Return the value as JSON; None if it cannot be read."""
        text = "".join(self._parts)
        try:
            found, end = self._read(text, 0, schema, 0)
        except (ValueError, IndexError):
            return None
        return found if end == len(text) else None

    def _read(self, text: str, at: int, schema: ArgumentSchema, depth: int) -> tuple[str, int]:
        """Return the JSON of the value at a position, and the position after it."""
        at = len(text) - len(text[at:].lstrip())
        if depth > _MOST_LEVELS:
            raise ValueError("too deep")
        if text.startswith(self._quote, at):
            end = text.index(self._quote, at + len(self._quote))
            inside = text[at + len(self._quote) : end]
            is_text = not schema.types or "string" in schema.types
            return quoted(inside) if is_text else as_json(inside, schema), end + len(self._quote)
        if text[at] == '"':
            return self._read_string(text, at, schema)
        if text[at] not in "{[":
            found = _SCALAR.match(text, at)
            if found is None:
                raise ValueError("no value")
            return as_json(found[0].strip(), schema), found.end()
        return self._read_container(text, at, schema, depth)

    def _read_container(self, text: str, at: int, schema: ArgumentSchema, depth: int) -> tuple[str, int]:
        is_list, parts, at = text[at] == "[", list[str](), at + 1
        while True:
            at = len(text) - len(text[at:].lstrip(", \t\r\n"))
            if text[at] in "}]":
                if (text[at] == "]") != is_list:
                    raise ValueError("another bracket")
                joined = ", ".join(parts)
                return (f"[{joined}]" if is_list else f"{{{joined}}}"), at + 1
            if is_list:
                value, at = self._read(text, at, schema.of_items, depth + 1)
            else:
                found = _keys(self._quote).match(text, at)
                if found is None:
                    raise ValueError("no key")
                key = _name(found[1], self._quote)
                value, at = self._read(text, found.end(), schema.of_property(key), depth + 1)
                value = f"{quoted(key)}: {value}"
            if not _AFTER_TEXT.match(text, at):
                raise ValueError("text after a value")
            parts.append(value)

    def _read_string(self, text: str, at: int, schema: ArgumentSchema) -> tuple[str, int]:
        literal = _STRING.match(text, at)
        found = _text_as_json(literal[0], schema) if literal else None
        if literal is None or found is None:
            raise ValueError("no string")
        return found, literal.end()


def _name(key: str, quote: str) -> str:
    """Return a key without its quotes, the mark or those of JSON."""
    return unquoted(key) if key.startswith('"') else key.removeprefix(quote).removesuffix(quote)


def _text_as_json(literal: str, schema: ArgumentSchema) -> str | None:
    """Return a string of JSON as the schema wants it; None if it is none."""
    if not is_json_string(literal):
        return None
    is_text = not schema.types or "string" in schema.types
    return quoted(unquoted(literal)) if is_text else as_json(unquoted(literal), schema)
