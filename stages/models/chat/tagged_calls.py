"""Calls in tags, ``<function=NAME><parameter=KEY>VALUE</parameter></function>`` and the like, translated into JSON.

A value is text between two tags, and may hold any text, those tags included.  So a tag ends a value only before what
may follow it in a call.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

from penstock.stages.models.chat.argument_values import ArgumentSchema, quoted
from penstock.stages.models.chat.call_readers import MOST_HEAD_CHARACTERS, CallSite, NameOf, plain_name
from penstock.stages.models.chat.elements import elements_as_json
from penstock.stages.models.chat.marks import Marks, begins_with
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, Piece

_QUOTED = r""""[^"\n]*"|'[^'\n]*'"""
_OPEN_QUOTE = re.compile(r"""["'][^\n]*\Z""")
_ATTRIBUTE = re.compile(rf"""([\w-]+)\s*=\s*({_QUOTED}|[^\s"']+)""")
_TAG_CHARACTERS = 64
"""Characters at the end of a value in which the tag that ends it may stand, damaged."""
_DAMAGED = re.compile(r"[^\n<>]{0,24}>")
"""The rest of a tag that ends a value, but for its first letters."""


@dataclass(frozen=True)
class Tag:
    """A tag with a name in it, from the text ``begin`` to one of ``ends``.

    The name is all that stands between them, or the attribute ``name_in``, for which the template writes ``escapes``:
    pairs of a text and what it stands for.  ``keeps_end`` leaves the end to be read again, as it is also the beginning
    of what follows.
    """

    begin: str
    ends: tuple[str, ...] = (">",)
    name_in: str = ""
    keeps_end: bool = False
    escapes: tuple[tuple[str, str], ...] = ()

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of the whole tag, whose group is what stands inside."""
        ends = "|".join(map(re.escape, self.ends))
        inside = r"([^\n<]*?)" if self.begin else r"\s*([^\s<>{}\"`]+)\s*?"
        if self.name_in:
            inside = rf"((?:{_QUOTED}|[^\n<\"'])*?)"
        return re.compile(re.escape(self.begin) + inside + (f"(?={ends})" if self.keeps_end else f"(?:{ends})"))

    def may_begin(self, text: str) -> bool | None:
        """True if ``text`` begins with the tag, None if it is too short to tell."""
        if not self.begin:
            return text[:1] not in ("<", "{", "[")
        return begins_with(text, self.begin)

    def may_go_on(self, text: str) -> bool:
        """True if more text may complete the tag that ``text`` begins with."""
        inside = text.removeprefix(self.begin)
        if not text.startswith(self.begin) or "\n" in inside:
            return False
        if self.name_in:
            inside = _OPEN_QUOTE.sub("", re.sub(_QUOTED, "", inside))
        end = inside.find("<")
        return end < 0 or any(each.startswith(inside[end:]) for each in self.ends)

    def read(self, inside: str) -> tuple[str, dict[str, str]]:
        """Return the name and the attributes of what stands inside a tag; an empty name if that is not all."""
        if not self.name_in:
            return unquoted_name(inside), {}
        if _ATTRIBUTE.sub("", inside).strip():
            return "", {}
        attributes = {key: self.meant(unquoted_name(value)) for key, value in _ATTRIBUTE.findall(inside)}
        return attributes.get(self.name_in, ""), attributes

    def meant(self, value: str) -> str:
        """Return the text that the escapes of an attribute stand for."""
        for written, meant in self.escapes:
            value = value.replace(written, meant)
        return value


def unquoted_name(name: str) -> str:
    """Return a name without the quotes around it; an empty one if it has a quote at one end alone."""
    name = name.strip()
    is_quoted = name[:1] in ('"', "'")
    if is_quoted != (name[-1:] in ('"', "'")) or (is_quoted and name[0] != name[-1]):
        return ""
    return name.strip("\"'").strip()


@dataclass(frozen=True)
class TaggedCall:
    """The form of one call: its ``head``, and for each argument a ``parameter``, its value, and ``value_end``.

    ``{key}`` in ``value_end`` stands for the name of the parameter.  ``end`` ends the call; without it, the mark after
    all calls does.  With ``trims_lines``, the template writes a line break before and after each value.  If the schema
    does not say that a value is text, the attribute ``type_in`` of its parameter does by the word ``texts``.
    """

    head: Tag
    parameter: Tag
    value_end: str
    end: str = ""
    gap: str = ""
    """Pattern of the marks between the tag of a parameter and its value."""
    trims_lines: bool = False
    type_in: str = ""
    texts: str = ""
    wrap: tuple[str, str] = ("", "")
    """The marks that may stand around a value, which then may hold all other marks."""
    nested: str = ""
    """The text that each element begins with, if values are made of elements."""
    name_of: NameOf = plain_name
    is_listed: bool = False

    @property
    def begins_with_name(self) -> bool:
        """True if the head is a bare name."""
        return not self.head.begin

    @property
    def begins(self) -> tuple[str, ...]:
        """The head, unless it is a bare name."""
        return (self.head.begin,) if self.head.begin else ()

    def may_begin(self, text: str) -> bool | None:
        """True at a head."""
        return self.head.may_begin(text)

    def __call__(self, site: CallSite) -> TaggedCallReader:
        """Return a reader of one call."""
        return TaggedCallReader(self, site)


class _State(Enum):
    HEAD = auto()
    TAG = auto()
    """Before a parameter or the end of the call."""
    VALUE_BEGIN = auto()
    VALUE = auto()


class TaggedCallReader:
    """Reads one call; it is announced at what may follow its head."""

    may_be_call = True

    def __init__(self, shape: TaggedCall, site: CallSite) -> None:
        self._shape = shape
        self._site = site
        self.text = ""
        self.is_call = self.is_done = self.is_broken = False
        self._state = _State.HEAD
        self._gap = re.compile(shape.gap)
        self._name = ""
        self._schema = ArgumentSchema()
        self._keys: set[str] = set()
        self._value: _Value | None = None
        self._value_end = self._value_end_begin = ""
        self._ends = Marks(())
        """The marks that may end the value."""
        self._is_line_blank = False
        """True if the value has only white space since its latest line break."""
        self._has_other_end = False
        """True if the value has had a tag that ends it, with other text behind it."""
        after_value = (shape.parameter.begin, *((shape.end,) if shape.end else ()))
        self._after_value = Marks(after_value)
        """The tags that may follow a value, or a head, besides the marks after a call."""

    def feed(self, text: str) -> Generator[Piece, None, int]:
        at, before = 0, (-1, self._state)
        while (at, self._state) != before and not self.is_done:
            before = (at, self._state)
            match self._state:
                case _State.HEAD:
                    at = yield from self._read_head(text)
                case _State.TAG:
                    at = yield from self._read_tag(text, at)
                case _State.VALUE_BEGIN:
                    at = self._read_value_begin(text, at)
                case _State.VALUE:
                    at = yield from self._read_value(text, at)
        return at

    def end(self, rest: str, *, marked: bool) -> Iterator[Piece]:
        """End the call: a mark also ends the value before it, but the end of a turn does not."""
        if self._state is _State.HEAD:
            if not (marked and self._begins_at_end(rest)):
                return
            yield CallPiece(self._name)
        elif self._state is _State.VALUE:
            yield from self._end_in_value(rest, marked=marked)
        elif self._state is _State.VALUE_BEGIN or not self._is_end(rest.strip()):
            yield from self._break(rest)
        if not self.is_broken and (marked or self._keys):
            yield ArgumentsPiece("}" if self._keys else "{}")

    def _is_end(self, rest: str) -> bool:
        """True if ``rest`` may be the beginning of the end of the call, which the turn has cut."""
        return not rest or (self._shape.end or self._shape.value_end).startswith(rest)

    def _end_in_value(self, rest: str, *, marked: bool) -> Iterator[Piece]:
        assert self._value
        found = self._ends.match(rest)
        after = rest[self._end_of(rest, found) :].strip() if found else ""
        lacks_end = found is None or found[0] == self._shape.end
        if lacks_end and (self._has_other_end or not self._value.may_lack_end("" if found else rest)):
            yield from self._value.feed(rest)
            yield from self._break("")
        elif found and self._is_end(after):
            yield from self._value.finish()
        elif marked and found is None:
            yield from self._value.feed(rest)
            yield from self._value.finish()
        else:
            yield from self._value.feed(rest)
            yield from self._break("")

    def _break(self, rest: str) -> Iterator[Piece]:
        """End the call where text comes that is no part of one."""
        self.is_done = self.is_broken = True
        yield ArgumentsPiece(rest, is_unexplained=True)

    def _begins_at_end(self, rest: str) -> bool:
        """Begin a call whose head is all that the model wrote of it."""
        head = self._shape.head
        found = head.pattern.match(f"{rest}{head.ends[0]}" if head.keeps_end else rest)
        return found is not None and not rest[found.end() :].strip() and self._begin_call(found[1])

    def _begin_call(self, inside: str) -> bool:
        self._name = self._shape.name_of(self._shape.head.read(inside)[0], self._site)
        self.is_call = bool(self._name) and self._site.may_be_called(self._name)
        self._schema = self._site.schema(self._name)
        return self.is_call

    def _read_head(self, text: str) -> Generator[Piece, None, int]:
        found = self._shape.head.pattern.match(text)
        if found is None:
            self.is_done = len(text) > MOST_HEAD_CHARACTERS or not self._shape.head.may_go_on(text)
            return 0
        follows = self._may_follow(text, found.end())
        if follows is None:
            return 0
        if follows and self._begin_call(found[1]):
            self._state = _State.TAG
            yield CallPiece(self._name)
            return found.end()
        self.is_done = True
        return 0

    def _may_follow(self, text: str, at: int) -> bool | None:
        """True if what follows in ``text`` may follow a value or a head; None if more text has to show it."""
        return _follows(text, at, (self._after_value, self._site.after))

    def _read_tag(self, text: str, at: int) -> Generator[Piece, None, int]:
        """Read what stands before a parameter or the end: white space, or a parameter that is none."""
        shape = self._shape
        rest = text[at:].lstrip()
        begin = len(text) - len(rest)
        if not rest:
            return begin
        if shape.end and rest.startswith(shape.end):
            self.is_done = True
            yield ArgumentsPiece("}" if self._keys else "{}")
            return begin + len(shape.end)
        if self._site.after.match(rest):
            self.is_done = True
            yield ArgumentsPiece("}" if self._keys else "{}")
            return begin
        found = shape.parameter.pattern.match(rest)
        if found and (read := shape.parameter.read(found[1]))[0]:
            self._state = _State.VALUE_BEGIN
            yield from self._begin_value(*read)
            return begin + found.end()
        is_short = len(rest) <= MOST_HEAD_CHARACTERS
        if is_short and (self._after_value.may_begin(rest) or self._site.after.may_begin(rest)):
            return begin
        if is_short and shape.parameter.may_go_on(rest):
            return begin
        self.is_done = self.is_broken = True
        return begin

    def _begin_reading(self, key: str, value: _Value) -> None:
        self._value, self._is_line_blank, self._has_other_end = value, False, False
        self._value_end = self._shape.value_end.format(key=key)
        is_tag = self._value_end.startswith("</") and self._value_end.endswith(">")
        self._value_end_begin = self._value_end[:-1] if is_tag else ""
        self._ends = Marks((self._value_end, self._value_end_begin, self._shape.end, self._shape.parameter.begin))

    def _begin_value(self, key: str, attributes: dict[str, str]) -> Iterator[Piece]:
        shape = self._shape
        if key in self._keys:
            self._begin_reading(key, _Value(None, trims_lines=False))
            return
        schema = self._schema.of_property(key)
        if not schema.types and attributes.get(shape.type_in) == shape.texts:
            schema = ArgumentSchema({"type": "string"})
        self._begin_reading(key, _Value(schema, trims_lines=shape.trims_lines, nested=shape.nested))
        yield ArgumentsPiece(f"{', ' if self._keys else '{'}{quoted(key)}: ")
        self._keys.add(key)

    def _read_value_begin(self, text: str, at: int) -> int:
        """Skip the marks between a tag and its value."""
        begin, end = self._shape.wrap
        is_wrapped = bool(begin) and begins_with(text[at:], begin)
        if is_wrapped is None:
            return at
        if is_wrapped:
            self._value_end = f"{end}{self._value_end}"
            self._ends = Marks((self._value_end,))
            self._state = _State.VALUE
            return at + len(begin)
        found = self._gap.match(text, at)
        if found:
            self._state = _State.VALUE
            return found.end()
        if len(text) - at >= MOST_HEAD_CHARACTERS or text[at:].lstrip()[:1] not in ("", "<"):
            self.is_done = self.is_broken = True
        return at

    def _read_value(self, text: str, at: int) -> Generator[Piece, None, int]:
        assert self._value
        searched = at
        while found := self._ends.search(text, searched):
            yield from self._take(text[at : found.start()])
            at = found.start()
            ends = None if self._ends.may_begin(text[at:]) else self._may_end(text, found)
            if ends is None:
                return at
            is_own_end = found[0] in (self._value_end, self._value_end_begin)
            self._has_other_end |= is_own_end and not ends
            if ends and not is_own_end and (self._has_other_end or not self._value.may_lack_end()):
                self.is_done = self.is_broken = True
                return at
            if ends:
                yield from self._value.finish()
                self._value, self._state = None, _State.TAG
                return self._end_of(text, found)
            searched = at + 1
        end = max(at, searched, len(text) - self._ends.overlap(text))
        yield from self._take(text[at:end])
        return end

    def _take(self, text: str) -> Iterator[Piece]:
        assert self._value
        *before, line = text.rsplit("\n", 1)
        self._is_line_blank = not line.strip() and (bool(before) or self._is_line_blank)
        return self._value.feed(text)

    def _may_end(self, text: str, found: re.Match[str]) -> bool | None:
        """True if a mark ends the value before it, None if more text has to show it."""
        assert self._value
        if found[0] == self._value_end:
            return self._may_follow(text, found.end())
        if found[0] == self._value_end_begin:
            return self._may_be_damaged(text, found.end())
        if found[0] == self._shape.end:
            return _follows(text, found.end(), (self._site.after,))
        if not self._value.is_kept:
            return True
        return self._is_line_blank and self._is_new_parameter(text, found.start())

    def _may_be_damaged(self, text: str, at: int) -> bool | None:
        """True if the end of the value stands there, with more inside the tag than its name."""
        rest = _DAMAGED.match(text, at)
        if rest is None:
            return None if text.find("\n", at) < 0 and len(text) - at < MOST_HEAD_CHARACTERS else False
        return self._may_follow(text, rest.end())

    def _end_of(self, text: str, found: re.Match[str]) -> int:
        """Return the position after the end of a value, or that of another mark that shows the end."""
        damaged = _DAMAGED.match(text, found.end()) if found[0] == self._value_end_begin else None
        if damaged:
            return damaged.end()
        return found.end() if found[0] == self._value_end else found.start()

    def _is_new_parameter(self, text: str, at: int) -> bool | None:
        """True if a parameter of the schema begins that was not given yet: the model left out the end of the value."""
        tag = self._shape.parameter.pattern.match(text, at)
        if tag is None:
            may_go_on = len(text) - at < MOST_HEAD_CHARACTERS and self._shape.parameter.may_go_on(text[at:])
            return None if may_go_on else False
        key = self._shape.parameter.read(tag[1])[0]
        return self._schema.has(key) and key not in self._keys


def _follows(text: str, at: int, expected: Iterable[Marks]) -> bool | None:
    """True if one of the ``expected`` marks follows after white space; None if more text has to show it."""
    rest = text[at:].lstrip()
    if any(marks.match(rest) for marks in expected):
        return True
    if len(text) - at > MOST_HEAD_CHARACTERS or not any(marks.may_begin(rest) for marks in expected):
        return False
    return None


class _Value:
    """Translates a value into JSON: a string as it arrives, any other at its end; None drops it."""

    def __init__(self, schema: ArgumentSchema | None, *, trims_lines: bool, nested: str = "") -> None:
        self._schema = schema
        self._nested = nested
        self._trims_lines = trims_lines
        self._streams = schema is not None and schema.is_text
        self._parts: list[str] = []
        self._has_begun = False
        self._held = ""
        """A line break that may be the last one."""
        self._line = ""
        """The end of the text so far, from its latest angle bracket or line on."""

    def may_lack_end(self, rest: str = "") -> bool:
        """True if the value may end without the tag that ends it, as its last line has nothing of a tag."""
        line = (self._line + rest).rstrip().rpartition("\n")[2]
        return "<" not in line and not line.endswith(">")

    @property
    def is_kept(self) -> bool:
        return self._schema is not None

    def feed(self, text: str) -> Iterator[Piece]:
        if self._schema is None or not text:
            return
        self._line = (self._line + text)[-_TAG_CHARACTERS:]
        if not self._streams:
            self._parts.append(text)
            return
        if not self._has_begun:
            self._has_begun = True
            yield ArgumentsPiece('"')
            text = text.removeprefix("\n") if self._trims_lines else text
        text = self._held + text
        self._held = "\n" if self._trims_lines and text.endswith("\n") else ""
        written = text[: len(text) - len(self._held)]
        if written:
            yield ArgumentsPiece(quoted(written)[1:-1])

    def finish(self) -> Iterator[Piece]:
        if self._schema is None:
            return
        if self._streams:
            yield ArgumentsPiece('"' if self._has_begun else '""')
            return
        text = "".join(self._parts)
        if self._trims_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        yield ArgumentsPiece(elements_as_json(text, self._schema, self._nested))
