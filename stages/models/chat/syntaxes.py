"""Parsers of text: what they are, how two are joined, and those of calls in a syntax other than the model's own."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from penstock.stages.models.chat.json_value import ValueEnd, unquoted
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, Function, Piece

logger = logging.getLogger(__name__)

_HEAD = re.compile(r'[\s\[\],}]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:parameters|arguments)"\s*:\s*(?=\S)')
_PUNCTUATION = "[]{}, \t\r\n"


@dataclass(frozen=True)
class OutputStart:
    """The facts about an output before it begins."""

    functions: Sequence[Function] = ()
    """All that the model may call."""
    prompt: Sequence[int] = ()
    marks: Mapping[str, int] = field(default_factory=dict)
    """The tokens of the vocabulary's marks."""
    call_marks: tuple[str, ...] = ()
    """The marks that calls begin with, if a `CallForm` describes them."""
    thinks: bool = False
    """True if the model continues a thought that was cut."""

    @property
    def names(self) -> list[str]:
        """The names of the functions."""
        return [function["function"]["name"] for function in self.functions]

    def latest(self, marks: Iterable[str], within: int = 0) -> str | None:
        """Return the last of some ``marks`` in the prompt, or in its last tokens ``within``."""
        tokens = {self.marks[mark]: mark for mark in marks if mark in self.marks}
        return next((tokens[token] for token in reversed(self.prompt[-within:]) if token in tokens), None)


class TextParser(Protocol):
    """Reads one output, or the answer after the thoughts: text in, pieces out.

    The pieces must not depend on where the text is cut.  `check_parser` of `penstock.testing` checks the rules.
    """

    def feed(self, text: str) -> Iterable[Piece]:
        """Take more text; return the pieces that are now certain."""
        ...

    def finish(self, *, cut: bool = False) -> Iterable[Piece]:
        """Return the pieces held back until the end; ``cut`` is True if the model did not end its turn itself."""
        ...


class Syntax(TextParser, Protocol):
    """A text parser that need not see all text; see `OutputParser` for ``triggers`` and `is_idle`."""

    @property
    def triggers(self) -> frozenset[str]: ...

    @property
    def is_idle(self) -> bool: ...


MakeSyntax: TypeAlias = Callable[[OutputStart], Syntax]
"""A parser as it is registered: a description, or a function, which makes the reader of one output."""


class Joined:
    """A reader of thoughts, whose answer is read by the one ``after`` it."""

    def __init__(self, first: Syntax, after: Syntax) -> None:
        self._first = first
        self._after = after
        self._has_answered = False
        self.triggers = first.triggers | after.triggers

    @property
    def is_idle(self) -> bool:
        return self._first.is_idle and (not self._has_answered or self._after.is_idle)

    def feed(self, text: str) -> Iterator[Piece]:
        yield from self._read(self._first.feed(text))

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        yield from self._read(self._first.finish(cut=cut))
        yield from self._after.finish(cut=cut)

    def _read(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if isinstance(piece, ContentPiece):
                self._has_answered = True
                yield from self._after.feed(piece.text)
            else:
                yield piece


class Guarded:
    """A reader of the operator's: if it fails, the rest of the output is text."""

    def __init__(self, reader: TextParser, name: str) -> None:
        self._reader: TextParser | None = reader
        self._name = name
        self.triggers: frozenset[str] = getattr(reader, "triggers", frozenset())

    @property
    def is_idle(self) -> bool:
        return self._reader is None or getattr(self._reader, "is_idle", False)

    def feed(self, text: str) -> Iterable[Piece]:
        try:
            return tuple(self._reader.feed(text)) if self._reader else (ContentPiece(text),)
        except Exception:  # noqa: BLE001 - the code is the operator's
            self._fail()
            return (ContentPiece(text),)

    def finish(self, *, cut: bool = False) -> Iterable[Piece]:
        try:
            return tuple(self._reader.finish(cut=cut)) if self._reader else ()
        except Exception:  # noqa: BLE001 - the code is the operator's
            self._fail()
            return ()

    def _fail(self) -> None:
        logger.warning("The parser %s failed: the rest of the output is passed on as text", self._name, exc_info=True)
        self._reader = None


class NeverIdle:
    """A syntax that has to see all text."""

    triggers: frozenset[str] = frozenset()
    is_idle = False


class BareArguments(NeverIdle):
    """The whole answer is the JSON arguments of the only function that may be called."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> Iterator[Piece]:
        if not self._has_begun and text.strip():
            self._has_begun = True
            yield CallPiece(self._name)
        if self._has_begun:
            yield ArgumentsPiece(text)

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        yield from ()


class ListedCalls(NeverIdle):
    """The answer is a JSON list of calls: objects with ``name`` and ``parameters``, in this order."""

    def __init__(self) -> None:
        self._head = ""
        self._value: ValueEnd | None = None

    def feed(self, text: str) -> Iterator[Piece]:
        while text:
            if self._value:
                end = self._value.feed(text)
                yield ArgumentsPiece(text[:end])
                text = "" if end is None else text[end:]
                self._value = self._value if end is None else None
            else:
                self._head += text
                match = _HEAD.match(self._head)
                if match is None:
                    return
                yield CallPiece(unquoted(match[1]))
                text, self._head, self._value = self._head[match.end() :], "", ValueEnd()

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        """Return text that did not become a call.  If the output was cut, the beginning of a call is dropped."""
        begins_call = self._head.lstrip()[:1] in tuple("[]{},")
        if self._head.strip(_PUNCTUATION) and not (cut and begins_call):
            yield ContentPiece(self._head)
