"""Outputs in sections, whose marks say what each is: a thought, text, or calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import ClassVar

from penstock.stages.models.chat.marks import Marks
from penstock.stages.models.chat.model import ContentPiece, Piece, ReasoningPiece
from penstock.stages.models.chat.syntaxes import Syntax
from penstock.stages.models.chat.triggers import Triggers


class Section(Enum):
    """A part of an output."""

    HEADER = auto()
    """The name of the function or the recipient of the next section, which is no text."""
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


class Sections:
    """Reads a whole output, reasoning included; a family adds the marks of each section, and what they enter."""

    marks: ClassVar[Mapping[Section, Marks]]
    """The marks that have a meaning in each section; others are text."""
    triggers: Triggers = frozenset("<")

    def __init__(self, calls: Syntax, section: Section) -> None:
        self._calls = calls
        self._section = section
        self._held = ""
        """Text that may still become a mark."""
        self._gives_text = False
        """True once the section has given a text, or a thought."""
        self._header = ""

    @property
    def is_idle(self) -> bool:
        return self._gives_text and not self._held

    def feed(self, text: str) -> Iterator[Piece]:
        self._held += text
        while self._held:
            section = self._section
            marks = self.marks[section]
            found = marks.search(self._held)
            end = found.start() if found else len(self._held) - marks.overlap(self._held)
            text, self._held = self._held[:end], self._held[end:]
            yield from self._give(text)
            if found and self._held.startswith(found[0]):
                self._held, self._gives_text = self._held[len(found[0]) :], False
                yield from self._enter(found[0])
            elif self._section is section:  # what is held may become a mark
                break

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        held, self._held = self._held, ""
        yield from self._give("" if cut and held.startswith("<") else held)
        yield from self._end(cut=cut)

    def _give(self, text: str) -> Iterator[Piece]:
        if not text:
            return
        self._gives_text = self._section in (Section.TEXT, Section.REASONING)
        match self._section:
            case Section.HEADER:
                self._header += text
            case Section.TEXT:
                yield ContentPiece(text)
            case Section.REASONING:
                yield ReasoningPiece(text)
            case Section.CALL:
                yield from self._calls.feed(text)

    def _enter(self, mark: str) -> Iterator[Piece]:
        """Go on after a mark."""
        raise NotImplementedError

    def _end(self, *, cut: bool = False) -> Iterator[Piece]:
        """Return what the section held back."""
        raise NotImplementedError
