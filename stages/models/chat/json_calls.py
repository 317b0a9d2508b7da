"""Calls whose arguments are JSON: an object with a name and arguments, or bare arguments after a head with the name."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from penstock.stages.models.chat.call_readers import MOST_HEAD_CHARACTERS, CallSite, NameOf, plain_name, unexplained
from penstock.stages.models.chat.json_value import ValueEnd, unquoted
from penstock.stages.models.chat.marks import begins_with
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, Piece

_NAMES = frozenset({"name", "tool_name"})
_ARGUMENTS = frozenset({"arguments", "parameters", "args"})
_OTHERS = frozenset({"type", "id", "index", "tool_call_id"})
_KEYS = _NAMES | _ARGUMENTS | _OTHERS
"""The keys of an object that is a call."""

_KEY = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*(?=\S)')
_PART_OF_KEY = re.compile(r'[\s,]*(?:"(?:[^"\\]|\\.)*\\?(?:"\s*(?::\s*)?)?)?')
_OBJECT_END = re.compile(r"[\s,]*\}")
_SCALAR = re.compile(r'[^\s,}\]"{\[]+(?=[\s,}\]])')


@dataclass(frozen=True)
class JsonCall:
    """A JSON object with a name and arguments; with ``is_keyed``, one whose only key is the name."""

    is_keyed: bool = False
    begins: tuple[str, ...] = ()
    is_listed: bool = True
    begins_with_name: bool = False

    def may_begin(self, text: str) -> bool | None:
        """True at an opening brace."""
        return text.startswith("{")

    def __call__(self, site: CallSite) -> JsonCallReader:
        """Return a reader of one object."""
        return JsonCallReader(site, is_keyed=self.is_keyed)


class JsonCallReader:
    """Reads one JSON object; its call is announced once its name is known to be that of a call."""

    def __init__(self, site: CallSite, *, is_keyed: bool) -> None:
        self._site = site
        self._is_keyed = is_keyed
        self.text = ""
        self.is_call = self.is_done = self.is_broken = False
        self._has_begun = False
        self._key: str | None = None
        """The key of the value that is being read."""
        self._value = ValueEnd()
        self._read = ""
        """The text of that value, unless it streams."""
        self._is_quoted = False
        """True if the value is a string; arguments may be JSON in one."""
        self._early = ""
        """Arguments that stand before the name."""
        self._has_arguments = False
        self._has_other_key = False
        """True if a key came before the name that no call has."""

    @property
    def may_be_call(self) -> bool:
        if self._key not in _NAMES or self._site.is_marked:
            return True
        begun = self._read.lstrip()[1:]
        return any(name.startswith(begun) for name in self._site.parameters)

    def feed(self, text: str) -> Generator[Piece, None, int]:
        at, before = 0, -1
        while at != before and at < len(text) and not self.is_done:
            before = at
            at = (yield from self._read_key(text, at)) if self._key is None else (yield from self._read_value(text, at))
        if not self.is_call:
            self.text += text[:at]
        return at

    def end(self, rest: str, *, marked: bool) -> Iterator[Piece]:
        if self._read and self._is_quoted and self._key in _ARGUMENTS:
            yield ArgumentsPiece(unquoted(f'{self._read}"'))
        elif self.is_call and self._key is None:
            yield from unexplained(rest.strip(" \t\r\n,}"))
        elif self.is_call and not (self._is_keyed or self._key in _ARGUMENTS):
            self.is_broken = True
            yield from unexplained(f'"{self._key}": {self._read}{rest}')
        else:
            yield from [ArgumentsPiece(rest)] if self.is_call and rest else []

    def _read_key(self, text: str, at: int) -> Generator[Piece, None, int]:
        if not self._has_begun:
            self._has_begun = True
            return at + 1
        if end := _OBJECT_END.match(text, at):
            self.is_done = True
            if self.is_call and not self._has_arguments:
                yield ArgumentsPiece("{}")
            return end.end()
        if found := _KEY.match(text, at):
            key = unquoted(found[1])
            if self.is_call and not self._is_keyed and (key not in _KEYS or key in _NAMES):
                self._break()
                return at
            self._key, self._value, self._read = key, ValueEnd(), ""
            self._has_other_key |= not self._is_keyed and key not in _KEYS
            self.is_done = not (self._site.is_marked or self.is_call or self._key in _KEYS)
            return found.end()
        if len(text) - at > MOST_HEAD_CHARACTERS or not _PART_OF_KEY.fullmatch(text, at):
            self._break()
        return at

    def _break(self) -> None:
        self.is_done = self.is_broken = True

    def _read_value(self, text: str, at: int) -> Generator[Piece, None, int]:
        streams = self._is_keyed or self._key in _ARGUMENTS
        if self._is_keyed and not self.is_call:
            yield from self._announce(self._key or "")
        if not self._value.began:
            if text[at] not in '{["':
                return (yield from self._read_scalar(text, at, streams=streams))
            self._is_quoted = text[at] == '"'
        length = self._value.feed(text[at:])
        part = text[at:] if length is None else text[at : at + length]
        if streams and self.is_call and not self._is_quoted:
            self._has_arguments = True
            yield ArgumentsPiece(part)
        else:
            self._read += part
        if length is None:
            return len(text)
        yield from self._end_value(streams=streams)
        return at + len(part)

    def _end_value(self, *, streams: bool) -> Iterator[Piece]:
        value, key = self._read, self._key
        self._key, self._read = None, ""
        if streams:
            yield from self._take_arguments(unquoted(value) if self._is_quoted else value)
        elif key in _NAMES:
            yield from self._announce(unquoted(value))

    def _take_arguments(self, arguments: str) -> Iterator[Piece]:
        if not self.is_call:
            self._early = arguments
        elif arguments:
            self._has_arguments = True
            yield ArgumentsPiece(arguments)

    def _read_scalar(self, text: str, at: int, *, streams: bool) -> Generator[Piece, None, int]:
        if found := _SCALAR.match(text, at):
            self._key = None
            if streams and found[0] != "null":
                yield from self._take_arguments(found[0])
            return found.end()
        if len(text) - at > MOST_HEAD_CHARACTERS:
            self._break()
        return at

    def _announce(self, name: str) -> Iterator[Piece]:
        if name and self._site.may_be_called(name):
            self.is_call = True
            yield CallPiece(name)
            yield from self._take_arguments(self._early)
            if self._has_other_key:
                self._break()
        else:
            self.is_done = True


@dataclass(frozen=True)
class HeadedCall:
    """Bare JSON arguments after a head, a pattern with the name as its group.

    ``begin`` is the text that every head begins with.  ``name_of`` finds the name of a function in what the group has.
    ``fence`` may stand around the arguments.  What does not match ``part`` becomes no head.
    """

    head: str
    begin: str = ""
    name_of: NameOf = plain_name
    fence: str = ""
    part: str = r"(?s:.*)"
    is_listed: bool = True

    @property
    def begins_with_name(self) -> bool:
        """True without a text that every head begins with."""
        return not self.begin

    @property
    def begins(self) -> tuple[str, ...]:
        """The text that every head begins with."""
        return (self.begin,) if self.begin else ()

    def may_begin(self, text: str) -> bool | None:
        """True at the beginning of a head, or at a letter if heads begin with the name."""
        if not self.begin:
            return text[:1].isalpha() or text[:1] == "_"
        return begins_with(text, self.begin)

    def __call__(self, site: CallSite) -> HeadedCallReader:
        """Return a reader of one call."""
        return HeadedCallReader(self, site)


class HeadedCallReader:
    """Reads a head with the name of a call, and the arguments after it."""

    may_be_call = True

    def __init__(self, shape: HeadedCall, site: CallSite) -> None:
        self._shape = shape
        self._site = site
        self._head = re.compile(re.escape(shape.begin) + shape.head)
        self._part = re.compile(shape.part)
        self._value = ValueEnd()
        self.text = ""
        self.is_call = self.is_done = self.is_broken = False

    def feed(self, text: str) -> Generator[Piece, None, int]:
        at = 0
        if not self.is_call:
            found = self._head.match(text)
            at = len(text) - len(text[found.end() :].lstrip()) if found else 0
            if found is None or text[at : at + 1] != "{":
                self.is_done = len(text) > MOST_HEAD_CHARACTERS or not self._part.fullmatch(text)
                return 0
            yield from self._announce(found[1])
            if self.is_done:
                return 0
        length = self._value.feed(text[at:])
        self.is_done = length is not None
        end = len(text) if length is None else at + length
        if length is None and self._shape.fence:
            end = max(at, len(text.rstrip(f"{self._shape.fence[0]} \n")))
        if end > at:
            yield ArgumentsPiece(text[at:end])
        return end

    def end(self, rest: str, *, marked: bool) -> Iterator[Piece]:
        if self.is_call:
            yield from self._rest(rest)
        elif marked and (found := self._head.match(rest)) and not rest[found.end() :].strip(f"{self._shape.fence} \n"):
            for piece in self._announce(found[1]):
                yield from (piece, ArgumentsPiece("{}"))

    def _rest(self, rest: str) -> Iterator[Piece]:
        if self._shape.fence:
            rest = rest.rstrip().removesuffix(self._shape.fence).rstrip()
        if rest:
            yield ArgumentsPiece(rest)

    def _announce(self, header: str) -> Iterator[Piece]:
        name = self._shape.name_of(header.strip(), self._site)
        self.is_call = self._site.may_be_called(name)
        self.is_done = not self.is_call
        yield from [CallPiece(name)] if self.is_call else ()


_KIMI_NAME = re.compile(r"(?:functions\.?)?(.*?)(?::?\d+)?", re.DOTALL)


def kimi_name(header: str, site: CallSite) -> str:
    """Return the function that the header of a call of Kimi K2 names.

    A header is ``functions.NAME:INDEX``.  Models also leave out the point, the colon, or the name, whose function is
    then the only one of the request.
    """
    named = header.removeprefix("functions.").rpartition(":")
    plain = named[0] if named[2].isdigit() and named[0] else header.removeprefix("functions.")
    if plain in site.parameters or not site.parameters:
        return plain
    found = _KIMI_NAME.fullmatch(header)
    if found and found[1] in site.parameters:
        return found[1]
    is_nameless = found is not None and found[1] in ("", "call", "call_")
    return next(iter(site.parameters)) if is_nameless and len(site.parameters) == 1 else plain
