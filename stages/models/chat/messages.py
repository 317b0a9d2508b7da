"""Turns of several messages, each after a header that names its recipient, as Muse writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from penstock.stages.models.chat.marked_calls import CallForm
from penstock.stages.models.chat.marks import Marks
from penstock.stages.models.chat.model import ContentPiece, Piece
from penstock.stages.models.chat.sections import Section, Sections
from penstock.stages.models.chat.syntaxes import OutputStart
from penstock.stages.models.chat.triggers import Beginnings

_START, _BODY, _RECIPIENT = "<|start|>", "<|message|>", "to="
_ENDS = ("<|eom|>", "<|eot|>")
_IN_TEXT = (_START, _BODY, *_ENDS, f" {_RECIPIENT}", f"\n{_RECIPIENT}")
"""The marks of a message that may end it; models leave out the beginning of a header."""


def _begun(word: str) -> str:
    """Return the pattern of the beginnings of a word."""
    return "".join(f"(?:{letter}" for letter in word) + ")?" * len(word)


_NAME = r"[^\s<]{0,128}"
_HEADER = re.compile(rf"(?:{re.escape(_START)}\s*(?:assistant)?)?\s*(?:{_RECIPIENT}({_NAME}))?\s*")
_PART_OF_HEADER = re.compile(
    rf"(?:{re.escape(_START)}\s{{0,8}}{_begun('assistant')})?\s{{0,8}}(?:{_begun('to')}|{_RECIPIENT}{_NAME}\s{{0,8}})"
)


@dataclass(frozen=True)
class MessageForm:
    """The form of turns whose messages are thoughts, answers or ``calls`` by their recipients; "" stands for none.

    A header is ``<|start|>assistant to=RECIPIENT<|message|>``.  The prompt has the beginning of the first one, and
    models leave it out before later ones.
    """

    texts: ClassVar = (_START, _BODY, *_ENDS)
    calls: CallForm
    thoughts: tuple[str, ...]
    answers: tuple[str, ...]

    def __call__(self, start: OutputStart) -> Messages:
        """Return a reader of a turn."""
        return Messages(self, start)

    def section(self, recipient: str) -> Section:
        """Return the section of a message."""
        if recipient in self.thoughts:
            return Section.REASONING
        return Section.TEXT if recipient in self.answers else Section.CALL


class Messages(Sections):
    """Reads the messages of a turn.

    Calls count in those to functions, and in text without a header.  An answer that begins with a call of a function
    that may be called is one, too: models forget the recipient.
    """

    triggers = Beginnings(_IN_TEXT)
    marks: ClassVar = {
        Section.HEADER: Marks((_START, _BODY, *_ENDS)),
        **dict.fromkeys((Section.TEXT, Section.REASONING, Section.CALL), Marks(_IN_TEXT)),
    }

    def __init__(self, form: MessageForm, start: OutputStart) -> None:
        self._messages = form
        self._start = start
        self._call_begins = Marks(form.calls.begins)
        self._begun: str | None = None
        """The text of an answer that may still begin with a call; None after that."""
        thoughts = tuple(f"{_RECIPIENT}{each}{_BODY}" for each in form.thoughts)
        has_begun = start.latest((_BODY,)) is not None
        self._before = Section.TEXT if has_begun else Section.CALL
        """The section of what turns out to be no header."""
        is_thought = start.thinks or start.latest(thoughts) is not None
        first = self._before if has_begun else Section.HEADER
        super().__init__(form.calls(start), Section.REASONING if is_thought else first)

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        while self._section is Section.HEADER and not self._is_blank:
            if cut and (_START in self._header or _RECIPIENT in self._header):
                break
            yield from self._refuse()
            yield from self.feed("")
        yield from super().finish(cut=cut)

    @property
    def _is_blank(self) -> bool:
        """True if the header names no recipient."""
        found = _HEADER.fullmatch(self._header + self._held)
        return found is not None and found[1] is None

    def _give(self, text: str) -> Iterator[Piece]:
        if self._begun is not None and self._section is Section.TEXT:
            text = self._begun + text
            begun = text.lstrip()
            if self._call_begins.match(begun):
                self._calls = self._messages.calls(self._start, whole=True, declared=True)
                self._section = Section.CALL
            is_text = not self._call_begins.may_begin(begun)
            self._begun, text = (None, text) if is_text else (text, "")
        yield from super()._give(text)
        if self._section is Section.HEADER and not _PART_OF_HEADER.fullmatch(self._header):
            yield from self._refuse()

    def _refuse(self, mark: str = "") -> Iterator[Piece]:
        """Go on in the section before what is no header; its first blank is text, and another one may follow."""
        text = self._header.removeprefix(_START)
        first = text[:1] if text[:1].isspace() else ""
        self._header, self._section = "", self._before
        self._held = text.removeprefix(first) + mark + self._held
        yield from self._give(first)

    def _enter(self, mark: str) -> Iterator[Piece]:
        if self._section is not Section.HEADER:
            self._before = self._section
        if mark == _BODY and self._is_stray:
            yield from self._calls.feed(mark) if self._section is Section.CALL else ()
            return
        found = _HEADER.fullmatch(self._header)
        if found is None or (found[1] is not None and mark != _BODY):
            yield from self._refuse(mark)
        elif mark == _BODY:
            yield from self._end()
            self._section = self._messages.section(found[1] or "")
            self._begun = ""
            self._calls = self._messages.calls(self._start)
        elif mark in _ENDS:
            yield from self._end()
            self._section, self._before = Section.HEADER, Section.CALL
        else:
            self._section, self._header = Section.HEADER, mark

    @property
    def _is_stray(self) -> bool:
        """True in a call or a thought: no header stands before the mark, so that no message begins there."""
        is_in_call = self._section is Section.CALL and not self._calls.is_idle
        return is_in_call or self._section is Section.REASONING

    def _end(self, *, cut: bool = False) -> Iterator[Piece]:
        begun, self._begun = self._begun, None
        yield from [ContentPiece(begun)] if begun and self._section is Section.TEXT else []
        yield from self._calls.finish(cut=cut)
        self._header = ""
