"""Inkling's output: blocks of reasoning, text and calls, each between marks that name its kind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

from penstock.stages.models.chat.marked_calls import CallForm
from penstock.stages.models.chat.marks import Marks
from penstock.stages.models.chat.model import ContentPiece, Piece
from penstock.stages.models.chat.sections import Section, Sections
from penstock.stages.models.chat.syntaxes import OutputStart

_CALL = "<|content_invoke_tool_json|>"
_ENDS = ("<|end_message|>", "<|content_model_end_sampling|>")
_SECTIONS: Mapping[str, Section] = {
    "<|message_model|>": Section.HEADER,
    "<|content_thinking|>": Section.REASONING,
    "<|content_text|>": Section.TEXT,
    "<|content_invoke_tool_text|>": Section.TEXT,
    "<|content_tool_error|>": Section.TEXT,
    _CALL: Section.CALL,
    **dict.fromkeys(_ENDS, Section.TEXT),
}
"""The section after each mark."""

INKLING_MARKS = tuple(_SECTIONS)

_FORM = CallForm((_CALL,))
_NAME = re.compile(r"[\w.:/-]*")


class InklingBlocks(Sections):
    """Reads a whole output, reasoning included.  The last mark of the prompt may have begun the first block."""

    texts: ClassVar = INKLING_MARKS
    marks: ClassVar = {
        Section.HEADER: Marks(_SECTIONS),
        Section.TEXT: Marks(_SECTIONS),
        Section.REASONING: Marks(("<|content_thinking|>", _CALL, *_ENDS)),
        Section.CALL: Marks(_ENDS),
    }

    def __init__(self, start: OutputStart) -> None:
        begun = start.latest(INKLING_MARKS)
        super().__init__(_FORM(start), _SECTIONS[begun] if begun else Section.TEXT)

    def _enter(self, mark: str) -> Iterator[Piece]:
        if mark in _ENDS or not _NAME.fullmatch(self._header):
            yield from self._end()
        self._header, self._section = "", _SECTIONS[mark]
        if self._section is Section.CALL:
            yield from self._calls.feed(mark)

    def _end(self, *, cut: bool = False) -> Iterator[Piece]:
        """Return what the block held back; a header is text if no block follows it, or if it is no name."""
        if self._section is Section.CALL:
            yield from self._calls.finish(cut=cut)
        elif self._header:
            yield ContentPiece(self._header)
            self._header = ""
