"""Thoughts between two marks, and the answer and the calls around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from penstock.stages.models.chat.fences import Fences
from penstock.stages.models.chat.marked_calls import MarkedCalls
from penstock.stages.models.chat.marks import Marks
from penstock.stages.models.chat.model import CallPiece, ContentPiece, Piece, ReasoningPiece
from penstock.stages.models.chat.syntaxes import OutputStart, Syntax
from penstock.stages.models.chat.triggers import united


@dataclass(frozen=True)
class ThoughtForm:
    """The form of a family's thoughts: the text between the marks ``start`` and ``end``.

    What stands after the last turn mark of the prompt shows if the output begins in a thought.  If it shows neither
    mark, the output does so with ``is_open``, unless the request wants no thought, and otherwise only if it begins with
    the first mark.

    The marks ``starts`` begin a thought, too, and ``ends`` end one.  They are dropped, as are the marks ``drops``
    around the answer, and those that may stand ``everywhere``.  A mark that begins a thought begins another one at the
    beginning of a line, outside a fence, and with ``recurs`` a mark ``start`` does so wherever it stands.  ``header``
    is a text after that mark.
    """

    start: str = "<think>"
    end: str = "</think>"
    is_open: bool = False
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()
    recurs: bool = False
    header: str = ""

    @property
    def thinking(self) -> tuple[str, str]:
        """Both marks."""
        return self.start, self.end

    @property
    def again(self) -> tuple[str, ...]:
        """The marks that begin another thought in an answer; words alone do not."""
        if self.recurs:
            return (self.start,)
        return tuple(mark for mark in (self.start, *self.starts) if mark[:1] in ("<", "["))

    def __call__(self, start: OutputStart) -> ThoughtsFirst:
        """Return a reader of these thoughts."""
        starts = (self.start, *self.starts)
        latest = start.latest((*starts, self.end, *self.ends))
        usual = self.is_open and not start.wants_no_thought
        is_open = latest in starts if latest else usual or None
        return ThoughtsFirst(self, is_open=start.thinks or is_open)


class ThoughtsFirst:
    """A thought, then the answer.

    With ``is_open``, the output begins in the thought, whose first mark may stand in the prompt.  If it is None, a
    first mark has to begin it; if it is False, the prompt has closed it.
    """

    def __init__(self, form: ThoughtForm, *, is_open: bool | None) -> None:
        self._form = form
        self._ends = Marks((form.end, *form.ends, *form.everywhere))
        self._everywhere = Marks(form.everywhere)
        self._in_answer = Marks((*form.again, *form.drops, *form.everywhere))
        self._is_open = is_open
        self._has_begun = is_open is False
        """True once it is certain if there is a thought."""
        self._has_text = False
        """True if the answer has text."""
        self._is_line_blank = True
        """True if the answer has no text since its latest line break."""
        self._fences = Fences()
        self._was_thought: bool | None = None
        """True if the latest piece was one of the thought; None if there was none."""
        self._held = ""
        self._header = form.header if is_open is not True else ""
        """The rest of the text after the first mark."""
        self._first = Marks((form.start, form.header, *form.starts))
        self._stray = Marks((form.end,))
        marks = (form.start, *form.starts, form.end, *form.ends, *form.drops, *form.everywhere)
        begins = frozenset(mark[0] for mark in marks if mark)
        self.triggers = begins if form.recurs or not form.again else begins | Fences.triggers | {"\n"}

    @property
    def is_open(self) -> bool:
        """True in a thought."""
        return bool(self._is_open)

    @property
    def is_idle(self) -> bool:
        """True if plain text would be returned, and change nothing here."""
        is_settled = self._is_open or (self._has_text and not self._is_line_blank and self._fences.is_settled)
        return self._has_begun and not self._held and self._was_thought is self._is_open and bool(is_settled)

    def feed(self, text: str) -> Iterator[Piece]:
        self._held += text
        if not self._has_begun:
            self._begin()
        before = None
        while self._has_begun and before != (before := (self._is_open, self._held)):
            yield from self._think() if self._is_open else self._answer()

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        if not (self._is_open and self._header):
            yield from self._give(len(self._held))

    def _begin(self) -> None:
        begun = self._held.lstrip()
        begins = self._first.match(begun)
        if not begins and self._first.may_begin(begun):
            return
        self._has_begun, self._is_open = True, self._is_open or begins is not None
        if begins and begins[0] != self._form.header:
            self._held = begun[begins.end() :]

    def _think(self) -> Iterator[Piece]:
        if self._header:
            while self._held.startswith(self._form.start):  # the model repeats the mark
                self._held = self._held.removeprefix(self._form.start)
            if self._form.start.startswith(self._held):
                return
            if self._header.startswith(self._held) and self._header != self._held:
                return
            bare = self._header.rstrip()
            is_bare = self._held.startswith(f"{bare}{self._form.end}")
            self._held, self._header = self._held.removeprefix(bare if is_bare else self._header), ""
        if end := self._ends.search(self._held):
            yield from self._give(end.start())
            self._held = self._held[len(end[0]) :]
            self._is_open = self._everywhere.match(end[0]) is not None
        else:
            yield from self._give(len(self._held) - self._ends.overlap(self._held))

    def _answer(self) -> Iterator[Piece]:
        if not self._has_text and (begun := self._held.lstrip()) and self._form.end:
            if begun.startswith(self._form.end):  # a thought that the prompt has closed is closed again
                self._held = self._held.replace(self._form.end, "", 1)
                return
            if self._stray.may_begin(begun):
                return
        if mark := self._in_answer.search(self._held):
            yield from self._give(mark.start())
            is_begin = mark[0] in self._form.again
            if is_begin and not (self._form.recurs or (self._is_line_blank and not self._fences.is_quoting)):
                yield from self._give(len(mark[0]))
                return
            self._held = self._held[len(mark[0]) :]
            if is_begin:
                self._is_open, self._has_text, self._is_line_blank = True, False, True
            self._header = self._form.header
        else:
            yield from self._give(len(self._held) - self._in_answer.overlap(self._held))

    def _give(self, length: int) -> Iterator[Piece]:
        text, self._held = self._held[:length], self._held[length:]
        if text:
            self._was_thought = bool(self._is_open)
            if not self._is_open:
                self._note(text)
            yield ReasoningPiece(text) if self._is_open else ContentPiece(text)

    def _note(self, text: str) -> None:
        """Note where in the answer its text ends."""
        _, line_break, line = text.rpartition("\n")
        self._has_text |= not text.isspace()
        self._is_line_blank = not line.strip() and (bool(line_break) or self._is_line_blank)
        self._fences.note(text)


class Turn:
    """The thoughts and the answer of a turn, with the calls in each.

    A call in a thought counts only if it is whole: a thought also speaks about calls.  The text after it is held back:
    it is thought if the mark that ends the thought still comes, and else the answer.
    """

    def __init__(self, thoughts: Syntax, in_answer: Syntax, new_in_thought: Callable[[], MarkedCalls] | None) -> None:
        self._thoughts = thoughts
        self._in_answer = in_answer
        self._new_in_thought = new_in_thought
        self._in_thought: MarkedCalls | None = None
        self._has_called = False
        """True if a call stands in the open thought."""
        self._after_call: list[ContentPiece] = []
        self._has_answered = False
        self.triggers = united(thoughts.triggers, in_answer.triggers)

    @property
    def is_idle(self) -> bool:
        has_settled = (
            self._in_thought.is_idle if self._in_thought else not self._has_answered or self._in_answer.is_idle
        )
        return self._thoughts.is_idle and has_settled and not self._has_called

    def feed(self, text: str) -> Iterator[Piece]:
        yield from self._read(self._thoughts.feed(text))

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        yield from self._read(self._thoughts.finish(cut=cut))
        yield from self._end_thought(cut=cut)
        yield from self._in_answer.finish(cut=cut)

    def _read(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            match piece:
                case ReasoningPiece(text) if self._new_in_thought:
                    self._in_thought = self._in_thought or self._new_in_thought()
                    yield from self._of_thought(self._in_thought, self._in_thought.feed(text))
                case ContentPiece(text):
                    self._has_answered = True
                    yield from self._end_thought()
                    yield from self._in_answer.feed(text)
                case _:
                    yield piece

    def _of_thought(self, reader: MarkedCalls, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            match piece:
                case ContentPiece() if self._has_called:
                    self._after_call.append(piece)
                case ContentPiece(text):
                    yield ReasoningPiece(text)
                case CallPiece():
                    yield from self._released(is_thought=False)
                    self._has_called = True
                    reader.count_all()
                    yield piece
                case _:
                    yield piece

    def _released(self, *, is_thought: bool) -> Iterator[Piece]:
        held, self._after_call = self._after_call, []
        yield from (ReasoningPiece(piece.text) if is_thought else piece for piece in held)

    def _end_thought(self, *, cut: bool = False) -> Iterator[Piece]:
        reader, self._in_thought = self._in_thought, None
        if reader:
            yield from self._of_thought(reader, reader.finish(cut=cut))
            yield from self._released(is_thought=not getattr(self._thoughts, "is_open", False))
            self._in_answer, self._has_called = reader if self._has_called else self._in_answer, False
