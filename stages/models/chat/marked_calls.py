"""Calls in the text of a turn: their marks, and the shape of each, for the families that a description suffices for."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from penstock.stages.models.chat.call_ids import CallId, id_of_client
from penstock.stages.models.chat.call_readers import MOST_HEAD_CHARACTERS, CallReader, CallShape, CallSite
from penstock.stages.models.chat.fences import Fences
from penstock.stages.models.chat.json_calls import JsonCall
from penstock.stages.models.chat.marks import Marks
from penstock.stages.models.chat.model import ArgumentsPiece, ContentPiece, DroppedPiece, Piece
from penstock.stages.models.chat.syntaxes import OutputStart
from penstock.stages.models.chat.written_calls import WrittenCalls

_MOST_REREAD = 4 * MOST_HEAD_CHARACTERS
"""Characters of what was no call that are searched for another call."""


@dataclass(frozen=True)
class CallForm:
    """The form of a family's calls, each alone or in a list.

    Calls begin after one of the marks ``begins``, and each has one of the ``shapes``: the first that reads its text.
    In code of Markdown, a mark begins a call of a function that may be called, and no other.  The marks ``lists`` stand
    before several calls: one that begins with a bare name then has a mark of its own.  The marks ``ends``, and those
    ``between`` calls, are dropped.  The prompt may end with the first mark.

    With ``is_bare``, calls at the beginning of a line count without a mark, if they name a function that may be called,
    and so do calls after ``fences``, marks that other text may have as well.  Calls whose shape has a beginning of its
    own count without a mark if they are whole.  ``drops`` are marks around the answer.

    ``call_id`` makes the ids that the template shows.  ``written`` is for the grammar of calls that must
    be made: the ways to write them.
    """

    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    fences: tuple[str, ...] = ()
    shapes: tuple[CallShape, ...] = (JsonCall(),)
    is_bare: bool = False
    lists: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    call_id: CallId = id_of_client
    written: tuple[WrittenCalls, ...] = ()

    def __call__(self, start: OutputStart, *, whole: bool = False, declared: bool = False) -> MarkedCalls:
        """Return a reader of these calls.

        With ``whole``, calls count only if they are whole, and with ``declared``, if they name a function that may be
        called.
        """
        reader = MarkedCalls(self, start, whole=whole, declared=declared)
        if not whole and (mark := start.last((*self.lists, *self.begins, *self.fences))):
            tuple(reader.feed(mark))
        return reader

    @property
    def heads(self) -> tuple[str, ...]:
        """The texts that calls begin with whose shape needs no mark."""
        return tuple(begin for shape in self.shapes for begin in shape.begins)

    @property
    def triggers(self) -> frozenset[str]:
        """The characters that calls may begin with, and the end of a line, after which a bare one may begin."""
        marks = (*self.lists, *self.begins, *self.fences, *self.heads, *self.drops)
        bare = frozenset("[{\n") if self.is_bare else frozenset()
        return frozenset(mark[0] for mark in marks) | bare | Fences.triggers


class _State(Enum):
    TEXT = auto()
    BETWEEN = auto()
    CALL = auto()
    WAITING = auto()
    """After a call, in text that belongs to it if a mark that ends calls follows."""
    BROKEN = auto()
    """In text of a call that no form explains."""
    AFTER = auto()
    """After a mark that ends calls, where others may follow."""


@dataclass
class _Candidate:
    """A call that is being read; its pieces are held back if it has to be ``whole``."""

    reader: CallReader
    whole: bool
    before: str
    """The marks and brackets before it, which are text, too, if it is no call."""
    others: list[CallShape]
    """The shapes that its text may have instead."""
    pieces: list[Piece] = field(default_factory=list)
    _read: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text that was read, as long as it may be no call."""
        return "".join(self._read) if self.whole else self.reader.text

    def feed(self, text: str) -> Generator[Piece, None, int]:
        """Read on, and return the number of characters that are read."""
        pieces = self.reader.feed(text)
        if not self.whole:
            return (yield from pieces)
        while True:
            try:
                self.pieces.append(next(pieces))
            except StopIteration as stop:
                length: int = stop.value
                self._read.append(text[:length])
                return length


_BRACKET = re.compile(r"[\[{]")
_REMAINS = frozenset("<>{}[])\"',|/")
"""The characters that remains of a call begin with, as those of a mark or a bracket."""
_LONGEST_ECHO = 4 * MOST_HEAD_CHARACTERS
"""Characters of a call that are compared with what follows it."""


class MarkedCalls:
    """Reads calls in a `CallForm`."""

    def __init__(self, form: CallForm, start: OutputStart, *, whole: bool = False, declared: bool = False) -> None:
        self._form = form
        self._whole = whole
        self._declared = declared
        begins = (*form.lists, *form.begins, *form.fences)
        self._begins = Marks(begins)
        self._in_text = Marks((*begins, *form.heads, *form.drops))
        """The marks that are no text between calls."""
        self._ends = Marks(form.ends)
        self._certain = Marks(mark for mark in (*form.ends, *form.between) if mark in start.marks)
        """The marks that are tokens, and so are never part of an argument."""
        self._marks = Marks((*begins, *form.ends, *form.between, *form.heads))
        self._bounds = Marks((*begins, *form.ends, *form.between))
        self._betweens = Marks(form.between)
        self._brackets = ",;[]" if any(shape.is_listed for shape in form.shapes) else ""
        self._marked = CallSite.of(start, is_marked=True, after=self._marks)
        self._unmarked = replace(self._marked, is_marked=False)
        self._may_be_bare = form.is_bare and bool(self._unmarked.parameters)
        self._state = _State.TEXT
        self._at_line_start = True
        self._fences = Fences()
        self._held = ""
        """Text that may still become a mark or a call."""
        self._candidate: _Candidate | None = None
        self._site = self._marked
        self._is_list = False
        """True if the latest mark was one of those before a list."""
        self._has_called = False
        """True if a call was read since the latest mark."""
        self._unused = ""
        """The mark and the brackets that are text, too, if no call follows them."""
        self._has_ended = False
        """True if a mark that ends calls was read since the latest call."""
        self._follows_call = False
        """True if a call and its marks are all that stands before the latest mark that begins calls."""
        self._open_brackets = 0
        self._lacks_end = False
        """True if a mark ended the latest call before its own end."""
        self._echo = ""
        """The text between the latest marks, which models repeat."""
        self.triggers = form.triggers

    @property
    def is_idle(self) -> bool:
        """True if plain text would be returned, and change nothing here."""
        is_settled = self._fences.is_settled and not (self._may_be_bare and self._at_line_start)
        return self._state is _State.TEXT and not self._held and is_settled

    def count_all(self) -> None:
        """Read on in an answer, where calls count that are not whole."""
        self._whole = False

    def feed(self, text: str) -> Iterator[Piece]:
        self._held += text
        yield from self._read()

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        """Return what is held back; the beginning of a call that was cut is left out."""
        while self._state is not _State.TEXT:
            if self._candidate:
                yield from self._end_call(self._candidate, cut=cut)
            elif self._state is _State.AFTER:
                self._state = _State.TEXT
                self._held = "" if self._ends.may_begin(self._held.strip()) else self._held
            elif self._state is _State.BROKEN:
                yield from self._give_broken(len(self._held))
                self._state = _State.TEXT
            elif self._state is _State.WAITING or self._has_called:
                rest = self._after()
                self._go_on(belongs=bool(self._belongs_to_call(rest)))
                self._held = "" if self._marks.may_begin(rest) else self._held
            elif self._follows_call and not self._after():
                yield DroppedPiece(self._unused + self._held)
                self._held, self._state = "", _State.TEXT
            elif cut and self._site is self._marked:
                self._held, self._state = "", _State.TEXT
            else:
                yield from self._end_calls()
            yield from self._read()
        held, self._held = self._held, ""
        yield from [ContentPiece(held)] if held else ()

    def _end_call(self, candidate: _Candidate, *, cut: bool) -> Iterator[Piece]:
        rest = self._held
        is_dropped = cut and candidate.reader.may_be_call and candidate.whole is self._whole
        if not is_dropped and (candidate.whole or not candidate.reader.is_call):
            yield from self._refuse()
        else:
            self._candidate, self._held, self._state = None, "", _State.TEXT
            yield from () if cut else candidate.reader.end(rest, marked=False)

    def _read(self) -> Iterator[Piece]:
        before = None
        while self._held and before != (before := (self._state, len(self._held), self._candidate)):
            match self._state:
                case _State.TEXT:
                    yield from self._read_text()
                case _State.BETWEEN:
                    yield from self._read_between()
                case _State.CALL:
                    yield from self._read_call()
                case _State.WAITING:
                    self._wait()
                case _State.BROKEN:
                    yield from self._read_broken()
                case _State.AFTER:
                    yield from self._read_after()

    # Text outside calls

    def _read_text(self) -> Iterator[Piece]:
        found = self._in_text.search(self._held)
        bare = self._bare_start(self._held[: found.start()] if found else self._held)
        if bare is not None:
            yield from self._give(bare)
            self._begin_calls("")
        elif found:
            yield from self._give(found.start())
            if self._in_text.may_begin(self._held):  # a longer one
                return
            if found[0] in self._form.drops:
                self._skip(len(found[0]))
            elif found[0] in self._form.heads:
                self._unused, self._has_called, self._site = "", False, self._unmarked
                heads = [each for each in self._form.shapes if each.begins and self._held.startswith(each.begins)]
                self._begin_candidate(heads, whole=True)
            else:
                self._skip(len(found[0]))
                self._begin_calls(found[0])
        else:
            yield from self._give(len(self._held) - self._in_text.overlap(self._held))

    def _bare_start(self, text: str) -> int | None:
        """Return the position of the first bracket at the beginning of a line, or None."""
        if not self._may_be_bare:
            return None
        for found in _BRACKET.finditer(text):
            line = text[: found.start()].rpartition("\n")
            if not line[2].strip() and (line[1] or self._at_line_start):
                return found.start()
        return None

    def _give(self, length: int) -> Iterator[Piece]:
        text, self._held = self._held[:length], self._held[length:]
        if text:
            last = text.rpartition("\n")[2]
            self._at_line_start = not last.strip() and ("\n" in text or self._at_line_start)
            yield self._text(text)

    def _text(self, text: str) -> Piece:
        self._fences.note(text)
        return ContentPiece(text)

    def _skip(self, length: int) -> None:
        self._held = self._held[length:]

    # Between and in calls

    def _begin_calls(self, mark: str) -> None:
        self._unused = mark
        self._note(mark)
        self._state = _State.BETWEEN

    def _note(self, mark: str) -> None:
        """Note the latest mark; a call may also stand in brackets without one."""
        self._follows_call = self._state is _State.BETWEEN and (self._has_called or self._follows_call)
        self._has_called, self._is_list, self._echo = False, mark in self._form.lists, ""
        self._has_ended, self._open_brackets = False, 0
        is_certain = self._is_list or mark in self._form.begins
        counts = is_certain and not (self._declared or self._fences.is_quoting)
        self._site = self._marked if counts else self._unmarked

    def _read_between(self) -> Iterator[Piece]:
        """Read what stands before a call: brackets, commas, marks, or text after all calls."""
        between = self._between()
        rest = self._held[len(between) :]
        if not rest:
            yield from self._end_calls() if len(self._held) > MOST_HEAD_CHARACTERS else ()
        elif found := self._ends.match(rest):
            yield from [] if self._has_called else [self._without_call(between, found[0])]
            self._has_ended = True
            self._remember(between)
            self._echo = self._echo.strip() if self._has_called else ""
            self._held, self._state, self._at_line_start = rest[found.end() :], _State.AFTER, False
        elif found := self._begins.match(rest):
            self._unused += between + found[0]
            self._held = rest[found.end() :]
            self._note(found[0])
        elif self._marks.may_begin(rest):
            return
        else:
            yield from self._begin_call(between, rest)

    def _between(self) -> str:
        """Return what is held of white space, brackets and marks before a call."""
        held, at = self._held, 0
        while at < len(held):
            if found := self._betweens.match(held, at):
                at = found.end()
            elif held[at].isspace() or (
                held[at] in self._brackets and not self._marks.match(held, at) and not self._marks.may_begin(held[at:])
            ):
                at += 1
            else:
                break
        return held[:at]

    def _after(self) -> str:
        """Return what is held after the white space, and after the brackets and marks between calls."""
        return self._held.lstrip() if self._has_ended else self._held[len(self._between()) :]

    def _read_after(self) -> Iterator[Piece]:
        """Drop further marks that end calls, as that of a list after that of its last call, and an echo of the call."""
        rest = self._held.lstrip()
        if found := self._ends.match(rest):
            self._held = rest[found.end() :]
        elif self._echo and rest.startswith(self._echo) and (found := self._ends.match(rest, len(self._echo))):
            self._held, self._echo = rest[found.end() :], ""
            yield DroppedPiece(rest[: found.end()])
        elif not (self._may_be_echo(rest) or (len(self._held) <= MOST_HEAD_CHARACTERS and self._may_be_mark(rest))):
            is_remains = rest[:1] in _REMAINS or self._betweens.match(rest)
            may_belong = self._has_called and (self._lacks_end or is_remains)
            self._state, self._echo = _State.WAITING if may_belong and rest else _State.TEXT, ""

    def _remember(self, text: str) -> None:
        if len(self._echo) <= _LONGEST_ECHO:
            self._echo += text

    def _may_be_mark(self, rest: str) -> bool:
        """True if the rest may become a mark that stands after a call."""
        return self._ends.may_begin(rest) or self._betweens.may_begin(rest)

    def _may_be_echo(self, rest: str) -> bool:
        echo = self._echo
        return 0 < len(echo) <= _LONGEST_ECHO and (
            echo.startswith(rest) or (rest.startswith(echo) and self._ends.may_begin(rest[len(echo) :]))
        )

    def _without_call(self, between: str, end: str) -> Piece:
        """Return what stands between marks that no call stands between: nothing, or the text that it is."""
        whole = self._unused + between + end
        is_empty = self._site is self._marked and not (between.strip() or self._whole)
        return DroppedPiece(whole) if is_empty else self._text(whole)

    def _begin_call(self, between: str, rest: str) -> Iterator[Piece]:
        needs_mark = self._has_called or self._is_list
        shapes = [shape for shape in self._form.shapes if not (needs_mark and shape.begins_with_name)]
        verdicts = [shape.may_begin(rest) for shape in shapes]
        if True in verdicts:
            self._unused += between
            self._held = rest
            self._remember(between)
            self._open_brackets += between.count("[") - between.count("]")
            fitting = [shape for shape, verdict in zip(shapes, verdicts, strict=True) if verdict]
            self._begin_candidate(fitting, whole=self._whole)
        elif None not in verdicts:
            yield from self._end_calls()

    def _begin_candidate(self, shapes: list[CallShape], *, whole: bool) -> None:
        shape, *others = shapes
        self._candidate = _Candidate(shape(self._site), whole, self._unused, others)
        self._state = _State.CALL

    def _end_calls(self) -> Iterator[Piece]:
        """Go on with text; if no call was read, the mark and the brackets are text, too."""
        if self._has_called:
            self._state = _State.WAITING
        else:
            self._state, self._at_line_start = _State.TEXT, False
            first, self._held = self._unused + self._held[:1], self._held[1:]
            yield self._text(first)

    def _wait(self) -> None:
        """Decide on what follows a call without the mark that ends it."""
        belongs = self._belongs_to_call(self._after())
        if belongs is not None:
            self._go_on(belongs=belongs)

    def _go_on(self, *, belongs: bool) -> None:
        """Go on after a call with text that ``belongs`` to it, or with other text."""
        if belongs or not self._has_ended:
            self._held = self._after()
        self._state, self._at_line_start = _State.BROKEN if belongs else _State.TEXT, False

    def _belongs_to_call(self, rest: str) -> bool | None:
        """True if what follows a call is part of it; None if more text has to show it."""
        is_marked = self._site is self._marked
        between = "" if self._has_ended else self._between()
        if not is_marked and "\n" in between:
            return False
        is_remains = rest[:1] in _REMAINS or any(rest.startswith(mark[1:]) for mark in self._form.ends)
        is_in_list = self._open_brackets + between.count("[") > between.count("]")
        if (is_remains and (self._lacks_end or not self._has_ended)) or (is_in_list and not self._has_ended):
            return True
        if not is_marked:
            return False
        end, begin = self._ends.search(rest), self._begins.search(rest)
        if end and not (begin and begin.start() < end.start()):
            return True
        may_end = self._form.ends and not begin and len(rest) <= MOST_HEAD_CHARACTERS
        return None if may_end else False

    def _read_broken(self) -> Iterator[Piece]:
        """Read text of a call that no form explains: up to a mark."""
        found = self._bounds.search(self._held)
        if found:
            self._state, self._has_ended = _State.BETWEEN, False
        yield from self._give_broken(found.start() if found else len(self._held) - self._bounds.overlap(self._held))

    def _give_broken(self, length: int) -> Iterator[Piece]:
        text = self._held[:length]
        self._skip(length)
        if text:
            yield ArgumentsPiece(text, is_unexplained=True)

    def _read_call(self) -> Iterator[Piece]:
        candidate = self._candidate
        assert candidate
        certain = self._certain.search(self._held)
        upto = certain.start() if certain else len(self._held) - self._certain.overlap(self._held)
        length = yield from candidate.feed(self._held[:upto])
        self._remember(self._held[:length])
        self._skip(length)
        if candidate.reader.is_done:
            yield from self._take() if candidate.reader.is_call else self._refuse()
        elif certain:
            rest = self._held[: upto - length]
            self._skip(len(rest))
            pieces = tuple(candidate.reader.end(rest, marked=True))
            candidate.pieces += pieces if candidate.whole else ()
            if candidate.reader.is_call and not (candidate.whole and candidate.reader.is_broken):
                yield from () if candidate.whole else pieces
                yield from self._take()
            else:
                self._held = rest + self._held
                yield from self._refuse()

    def _take(self) -> Iterator[Piece]:
        """Go on after a call, and return what was held back of it; a broken one is text if it had to be whole."""
        assert self._candidate
        if self._candidate.reader.is_broken:
            if self._candidate.whole:
                yield from self._refuse()
                return
            self._state = _State.BROKEN
        else:
            self._state = _State.BETWEEN
        self._has_ended = False
        self._lacks_end = self._candidate.reader.is_broken or not self._candidate.reader.is_done
        pieces = self._candidate.pieces
        self._candidate, self._has_called, self._unused = None, True, ""
        yield from pieces

    def _refuse(self) -> Iterator[Piece]:
        """Go on after what turned out to be no call: it has another shape, or is text, in which a call may begin."""
        assert self._candidate
        before, read, others = self._candidate.before, self._candidate.text, self._candidate.others
        if others:
            self._held = read + self._held
            self._begin_candidate(others, whole=self._candidate.whole)
            return
        self._candidate, self._at_line_start = None, False
        if self._has_called:
            between = before if self._site is self._unmarked else ""  # a line break there ends a call without a mark
            self._held, self._state = between + read + self._held, _State.WAITING
            return
        self._state = _State.TEXT
        if len(read) <= _MOST_REREAD and self._in_text.search(read):
            begin = self._next_begin(read)
            self._held, read = read[begin:] + self._held, read[:begin]
        text = before + read
        if not text:
            text = self._held[: self._next_begin(self._held)]
            self._skip(len(text))
        yield self._text(text)

    def _next_begin(self, text: str) -> int:
        """Return the position of the first character but one that may not be text, or the length."""
        if self._may_be_bare:
            return 1
        found = self._in_text.search(text, 1)
        return found.start() if found else len(text) - self._in_text.overlap(text[1:])
