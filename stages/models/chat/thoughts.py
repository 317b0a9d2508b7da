"""Thoughts between two marks, before the answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.stages.models.chat.marked_calls import overlap
from penstock.stages.models.chat.model import ContentPiece, Piece, ReasoningPiece
from penstock.stages.models.chat.syntaxes import OutputStart

_PROMPT_END = 8
"""The tokens at the end of a prompt in which a template opens a thought, or closes an empty one."""


@dataclass(frozen=True)
class ThoughtForm:
    """The form of a family's thoughts: the text between the marks ``start`` and ``end``.

    The end of the prompt shows if the output begins in a thought.  If it shows neither mark, the output does so with
    ``is_open``, and otherwise only if it begins with the first mark.  With ``ends_at_calls``, the mark of a call ends a
    thought, too.
    """

    start: str = "<think>"
    end: str = "</think>"
    is_open: bool = False
    ends_at_calls: bool = False

    @property
    def thinking(self) -> tuple[str, str]:
        """Both marks."""
        return self.start, self.end

    def __call__(self, start: OutputStart) -> ThoughtsFirst:
        """Return a reader of these thoughts."""
        latest = start.latest(self.thinking, within=_PROMPT_END)
        is_open = latest == self.start if latest else self.is_open or None
        calls = start.call_marks if self.ends_at_calls else ()
        return ThoughtsFirst(self, calls, is_open=start.thinks or is_open)


class ThoughtsFirst:
    """A thought, then the answer.

    The marks ``calls`` end a thought, too, and belong to the answer.  With ``is_open``, the output begins in the
    thought, whose first mark may stand in the prompt.  If it is None, a first mark has to begin it; if it is False,
    there is none.
    """

    def __init__(self, form: ThoughtForm, calls: tuple[str, ...] = (), *, is_open: bool | None) -> None:
        self._form = form
        self._ends = (form.end, *calls)
        self._end = re.compile("|".join(map(re.escape, self._ends)))
        self._is_open = is_open
        self._has_begun = is_open is False
        """True once it is certain if there is a thought."""
        self._was_thought: bool | None = None
        """True if the latest piece was one of the thought; None if there was none."""
        self._held = ""
        self.triggers = frozenset(mark[0] for mark in (form.start, *self._ends))

    @property
    def is_idle(self) -> bool:
        return self._has_begun and not self._held and self._was_thought is self._is_open

    def feed(self, text: str) -> Iterator[Piece]:
        self._held += text
        if not self._has_begun:
            self._begin()
        if self._has_begun and self._is_open:
            yield from self._think()
        if self._has_begun and not self._is_open:
            yield from self._give()

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        yield from self._give()

    def _begin(self) -> None:
        start, begun = self._form.start, self._held.lstrip()
        if start.startswith(begun) and begun != start:
            return
        self._has_begun, self._is_open = True, self._is_open or begun.startswith(start)
        self._held = begun.removeprefix(start) if begun.startswith(start) else self._held

    def _think(self) -> Iterator[Piece]:
        if end := self._end.search(self._held):
            at, rest_at = end.start(), end.end() if end[0] == self._form.end else end.start()
        else:
            at = rest_at = len(self._held) - overlap(self._held, self._ends)
        rest, self._held = self._held[rest_at:], self._held[:at]
        yield from self._give()
        self._held, self._is_open = rest, end is None

    def _give(self) -> Iterator[Piece]:
        text, self._held = self._held, ""
        if text:
            self._was_thought = bool(self._is_open)
            yield ReasoningPiece(text) if self._is_open else ContentPiece(text)
