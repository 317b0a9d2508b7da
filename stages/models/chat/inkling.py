"""Inkling's output: blocks of reasoning, text and calls, each between marks that name its kind.

vLLM's parser reads all arguments again for each token.  This one reads each character once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum, auto

from penstock.stages.models.chat.marked_calls import CallForm
from penstock.stages.models.chat.marks import Marks
from penstock.stages.models.chat.model import ContentPiece, Piece, ReasoningPiece
from penstock.stages.models.chat.syntaxes import OutputStart


class _Section(Enum):
    HEADER = auto()
    """Between the mark of a message and that of its kind: the name of a function, which is no text."""
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


_CALL = "<|content_invoke_tool_json|>"
_ENDS = ("<|end_message|>", "<|content_model_end_sampling|>")
_SECTIONS: Mapping[str, _Section] = {
    "<|message_model|>": _Section.HEADER,
    "<|content_thinking|>": _Section.REASONING,
    "<|content_text|>": _Section.TEXT,
    "<|content_invoke_tool_text|>": _Section.TEXT,
    "<|content_tool_error|>": _Section.TEXT,
    _CALL: _Section.CALL,
    **dict.fromkeys(_ENDS, _Section.TEXT),
}
"""The section after each mark."""

_KNOWN: Mapping[_Section, tuple[str, ...]] = {
    _Section.HEADER: tuple(_SECTIONS),
    _Section.TEXT: tuple(_SECTIONS),
    _Section.REASONING: ("<|content_thinking|>", _CALL, *_ENDS),
    _Section.CALL: _ENDS,
}
"""The marks that have a meaning in each section; others are text."""

INKLING_MARKS = tuple(_SECTIONS)

_MARKS = {section: Marks(marks) for section, marks in _KNOWN.items()}
_FORM = CallForm((_CALL,))
_NAME = re.compile(r"[\w.:/-]*")


class InklingBlocks:
    """Reads a whole output, reasoning included.  The last mark of the prompt may have begun the first block."""

    triggers = frozenset("<")

    def __init__(self, start: OutputStart) -> None:
        self._start = start
        begun = start.latest(INKLING_MARKS)
        self._section = _SECTIONS[begun] if begun else _Section.TEXT
        self._held = ""
        """Text that may still become a mark."""
        self._header = ""
        self._calls = _FORM(start)

    @property
    def is_idle(self) -> bool:
        return self._section in (_Section.TEXT, _Section.REASONING) and not self._held

    def feed(self, text: str) -> Iterator[Piece]:
        self._held += text
        while found := _MARKS[self._section].search(self._held):
            text, self._held = self._held[: found.start()], self._held[found.end() :]
            yield from self._give(text)
            yield from self._enter(found[0])
        end = len(self._held) - _MARKS[self._section].overlap(self._held)
        text, self._held = self._held[:end], self._held[end:]
        yield from self._give(text)

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        held, self._held = self._held, ""
        yield from self._give("" if cut else held)
        yield from self._end_block(cut=cut)

    def _give(self, text: str) -> Iterator[Piece]:
        if not text:
            return
        match self._section:
            case _Section.HEADER:
                self._header += text
            case _Section.TEXT:
                yield ContentPiece(text)
            case _Section.REASONING:
                yield ReasoningPiece(text)
            case _Section.CALL:
                yield from self._calls.feed(text)

    def _enter(self, mark: str) -> Iterator[Piece]:
        if mark in _ENDS or not _NAME.fullmatch(self._header):
            yield from self._end_block()
        self._header, self._section = "", _SECTIONS[mark]
        if self._section is _Section.CALL:
            self._calls = _FORM(self._start)
            yield from self._calls.feed(mark)

    def _end_block(self, *, cut: bool = False) -> Iterator[Piece]:
        """Return what the block held back; a header is text if no block follows it, or if it is no name."""
        if self._section is _Section.CALL:
            yield from self._calls.finish(cut=cut)
        elif self._header:
            yield ContentPiece(self._header)
            self._header = ""
