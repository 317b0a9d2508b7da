"""Calls between marks, or at the beginning of a line: as JSON objects, or written in Python.

One machine reads all of them; a `CallForm` describes the marks and the calls of a family.  It reads each character
once, whatever the text, so its cost per token does not grow with the length of a call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from penstock.stages.models.chat.json_value import ValueEnd, unquoted
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, Piece
from penstock.stages.models.chat.python_call import PythonCall
from penstock.stages.models.chat.syntaxes import OutputStart

_ARGUMENTS = frozenset({"arguments", "parameters", "args"})
_FIRST_KEYS = _ARGUMENTS | {"name", "type", "id"}
"""The keys that an object may begin with if it is a call."""

_KEY = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*(?=\S)')
_PART_OF_KEY = re.compile(r'[\s,]*(?:"(?:[^"\\]|\\.)*\\?(?:"\s*(?::\s*)?)?)?')
_OBJECT_END = re.compile(r"[\s,]*\}")
_SCALAR = re.compile(r'[^\s,}\]"{\[]+(?=[\s,}\]])')
_LONGEST_HEAD = 512
"""Characters of a key, a name or a number after which the text is no call."""


@dataclass(frozen=True)
class CallForm:
    """The form of a family's calls, each alone or in a list.

    A call is a JSON object with a name and arguments.  With ``is_keyed``, the object has the name as its only key, and
    the arguments as its value; with ``is_python``, it is a Python call.  With a mark ``call``, bare arguments follow it
    after a ``head``, a pattern with the name as its group.

    Calls begin after one of the marks ``begins``; the marks ``ends``, and those ``between`` calls, are dropped.  With
    ``is_bare``, calls at the beginning of a line count, too, if they name a function that may be called, and so do
    calls after ``fences``, marks that other text may have as well.
    """

    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    fences: tuple[str, ...] = ()
    is_bare: bool = False
    is_keyed: bool = False
    is_python: bool = False
    call: str = ""
    head: str = ""
    between: tuple[str, ...] = ()

    def __call__(self, start: OutputStart) -> MarkedCalls:
        """Return a reader of these calls."""
        return MarkedCalls(self, set(start.names))

    @property
    def triggers(self) -> frozenset[str]:
        """The characters that calls may begin with, and the end of a line, after which a bare one may begin."""
        return frozenset(mark[0] for mark in (*self.begins, *self.fences)) | (
            frozenset("[{\n") if self.is_bare else frozenset()
        )


class _State(Enum):
    TEXT = auto()
    BETWEEN = auto()
    OBJECT = auto()


class MarkedCalls:
    """Reads calls in a `CallForm`; ``names`` are the functions that may be called."""

    def __init__(self, form: CallForm, names: Collection[str]) -> None:
        self._form = form
        self._names = names
        self._begins = (*form.begins, *form.fences)
        self._begin = _any_of(self._begins)
        self._end = _any_of(form.ends)
        self._marks = tuple(filter(None, (*self._begins, *form.ends, *form.between, form.call)))
        self._between = re.compile("(?:{})*".format("|".join((r"[\s,;\[\]]", *map(re.escape, form.between)))))
        self._bare = re.compile(r"\[" if form.is_python else r"[\[{]")
        self._state = _State.TEXT
        self._at_line_start = True
        self._held = ""
        """Text that may still become a mark or a call."""
        self._object: _CallObject | _HeadedCall | PythonCall | None = None
        self._is_marked = False
        """True after a mark: an object is then a call whatever its name."""
        self._has_called = False
        """True if a call was read since the latest mark."""
        self._unused = ""
        """The mark and the brackets that are text, too, if no call follows them."""

    @property
    def triggers(self) -> frozenset[str]:
        return self._form.triggers

    @property
    def is_idle(self) -> bool:
        return self._state is _State.TEXT and not self._held

    def feed(self, text: str) -> Iterator[Piece]:
        self._held += text
        before = None
        while self._held and before != (before := (self._state, self._held)):
            match self._state:
                case _State.TEXT:
                    yield from self._read_text()
                case _State.BETWEEN:
                    yield from self._read_between()
                case _State.OBJECT:
                    yield from self._read_object()

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        held, self._held = self._held, ""
        if self._object:
            if self._object.is_call and not cut:
                yield from self._object.finish()
            drops = self._object.is_call or (cut and self._object.may_be_call)
            held = "" if drops else self._unused + self._object.text + held
        elif self._state is _State.BETWEEN:
            held = "" if self._has_called or (cut and self._is_marked) else self._unused + held
        yield from [ContentPiece(held)] if held else ()

    def _new_object(self) -> _CallObject | _HeadedCall | PythonCall:
        if self._form.call:
            return _HeadedCall(self._form.call + self._form.head)
        if self._form.is_python:
            return PythonCall(self._names, is_marked=self._is_marked)
        return _CallObject(self._names, is_marked=self._is_marked, is_keyed=self._form.is_keyed)

    def _may_begin(self, text: str) -> bool:
        if self._form.call:
            return text.startswith(self._form.call)
        return PythonCall.may_begin(text) if self._form.is_python else text[0] == "{"

    # Text outside calls

    def _read_text(self) -> Iterator[Piece]:
        begun = self._begin.search(self._held) if self._begin else None
        bare = self._bare_start(self._held[: begun.start()] if begun else self._held)
        if bare is not None:
            yield from self._give(bare)
            self._begin_calls("")
        elif begun:
            yield from self._give(begun.start())
            if not any(mark.startswith(self._held) and mark != self._held for mark in self._begins):  # a longer one
                self._skip(len(begun[0]))
                self._begin_calls(begun[0])
        else:
            yield from self._give(len(self._held) - overlap(self._held, self._begins))

    def _bare_start(self, text: str) -> int | None:
        """Return the position of the first bracket at the beginning of a line, or None."""
        if not (self._form.is_bare and self._names):
            return None
        for found in self._bare.finditer(text):
            line = text[: found.start()].rpartition("\n")
            if not line[2].strip() and (line[1] or self._at_line_start):
                return found.start()
        return None

    def _give(self, length: int) -> Iterator[Piece]:
        text, self._held = self._held[:length], self._held[length:]
        if text:
            last = text.rpartition("\n")[2]
            self._at_line_start = not last.strip() and ("\n" in text or self._at_line_start)
            yield ContentPiece(text)

    def _skip(self, length: int) -> None:
        self._held = self._held[length:]

    # Between and in calls

    def _begin_calls(self, mark: str) -> None:
        self._state, self._has_called, self._unused = _State.BETWEEN, False, mark
        self._is_marked = mark in self._form.begins

    def _read_between(self) -> Iterator[Piece]:
        """Read what stands before an object: brackets, commas, marks, or text after all calls."""
        between = self._between.match(self._held)
        assert between
        rest = self._held[between.end() :]
        if not rest:
            yield from self._end_calls() if len(self._held) > _LONGEST_HEAD else ()
        elif found := self._end and self._end.match(rest):
            self._held, self._state, self._at_line_start = rest[found.end() :], _State.TEXT, False
            yield from [] if self._has_called else [ContentPiece(self._unused + between[0] + found[0])]
        elif found := self._begin and self._begin.match(rest):
            self._unused += between[0] + found[0]
            self._held, self._has_called = rest[found.end() :], False
            self._is_marked = found[0] in self._form.begins
        elif overlap(rest, self._marks) == len(rest):
            return
        elif self._may_begin(rest):
            self._object = self._new_object()
            self._unused += between[0]
            self._held, self._state = rest, _State.OBJECT
        else:
            yield from self._end_calls()

    def _end_calls(self) -> Iterator[Piece]:
        """Go on with text; if no call was read, the mark and the brackets are text, too."""
        self._state, self._at_line_start = _State.TEXT, False
        if self._has_called:
            self._held = self._between.sub("", self._held, count=1)
        else:
            first, self._held = self._unused + self._held[:1], self._held[1:]
            yield ContentPiece(first)

    def _read_object(self) -> Iterator[Piece]:
        read = self._object
        assert read
        self._skip((yield from read.feed(self._held)))
        if not read.is_done:
            return
        self._object = None
        if read.is_call:
            self._has_called, self._state, self._unused = True, _State.BETWEEN, ""
        else:
            self._state, self._at_line_start = _State.TEXT, False
            yield ContentPiece(self._unused + read.text)


class _CallObject:
    """Reads one JSON object; its call is announced once its name is known to be that of a call."""

    def __init__(self, names: Collection[str], *, is_marked: bool, is_keyed: bool) -> None:
        self._names = names
        self._is_marked = is_marked
        self._is_keyed = is_keyed
        self.text = ""
        """The text of the object, until it is a call."""
        self.is_call = self.is_done = False
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

    def finish(self) -> Iterator[Piece]:
        """End a call that the model did not complete; its arguments stay as they are."""
        yield from ()

    @property
    def may_be_call(self) -> bool:
        """True if the rest of the text may still make a call of it."""
        if self._key != "name" or self._is_marked:
            return True
        begun = self._read.lstrip()[1:]
        return any(name.startswith(begun) for name in self._names)

    def feed(self, text: str) -> Generator[Piece, None, int]:
        """Read on, and return the number of characters that are read; the caller gives the others again."""
        at, before = 0, -1
        while at != before and at < len(text) and not self.is_done:
            before = at
            at = self._read_key(text, at) if self._key is None else (yield from self._read_value(text, at))
        if not self.is_call:
            self.text += text[:at]
        return at

    def _read_key(self, text: str, at: int) -> int:
        if not self._has_begun:
            self._has_begun = True
            return at + 1
        if end := _OBJECT_END.match(text, at):
            self.is_done = True
            return end.end()
        if found := _KEY.match(text, at):
            self._key, self._value, self._read = unquoted(found[1]), ValueEnd(), ""
            self.is_done = not (self._is_marked or self.is_call or self._key in _FIRST_KEYS)
            return found.end()
        if len(text) - at > _LONGEST_HEAD or not _PART_OF_KEY.fullmatch(text, at):
            self.is_done = True
        return at

    def _read_value(self, text: str, at: int) -> Generator[Piece, None, int]:
        streams = self._is_keyed or self._key in _ARGUMENTS
        if self._is_keyed and not self.is_call:
            yield from self._announce(self._key or "")
        if not self._value.began:
            if text[at] not in '{["':
                return self._read_scalar(text, at)
            self._is_quoted = text[at] == '"'
        length = self._value.feed(text[at:])
        part = text[at:] if length is None else text[at : at + length]
        if streams and self.is_call and not self._is_quoted:
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
            arguments = unquoted(value) if self._is_quoted else value
            if self.is_call:
                yield from [ArgumentsPiece(arguments)] if arguments else ()
            else:
                self._early = arguments
        elif key == "name":
            yield from self._announce(unquoted(value))

    def _read_scalar(self, text: str, at: int) -> int:
        if found := _SCALAR.match(text, at):
            self._key = None
            return found.end()
        self.is_done = len(text) - at > _LONGEST_HEAD
        return at

    def _announce(self, name: str) -> Iterator[Piece]:
        if self._is_marked or name in self._names:
            self.is_call = True
            yield CallPiece(name)
            yield from [ArgumentsPiece(self._early)] if self._early else ()
        else:
            self.is_done = True


class _HeadedCall:
    """Reads a head with the name of a call, and the arguments after it."""

    may_be_call = True

    def __init__(self, head: str) -> None:
        self._head = re.compile(head)
        self._value = ValueEnd()
        self.text = ""
        self.is_call = self.is_done = False

    def feed(self, text: str) -> Generator[Piece, None, int]:
        """Read on, and return the number of characters that are read; the caller gives the others again."""
        at = 0
        if not self.is_call:
            found = self._head.match(text)
            if found is None:
                self.is_done = len(text) > _LONGEST_HEAD
                return 0
            self.is_call, at = True, found.end()
            yield CallPiece(found[1].strip())
        length = self._value.feed(text[at:])
        self.is_done = length is not None
        end = len(text) if length is None else at + length
        yield ArgumentsPiece(text[at:end])
        return end

    def finish(self) -> Iterator[Piece]:
        """End a call that the model did not complete; its arguments stay as they are."""
        yield from ()


def _any_of(marks: Collection[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, marks))) if marks else None


def overlap(text: str, marks: Collection[str]) -> int:
    """Return the length of the longest end of ``text`` that may become a mark."""
    longest = max(map(len, marks), default=0)
    for length in range(min(len(text), longest - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
