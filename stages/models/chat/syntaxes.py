"""Parsers of text: what they are, how two are joined, and those of calls in a syntax other than the model's own."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from penstock.stages.models.chat.json_value import ValueEnd, unquoted
from penstock.stages.models.chat.model import (
    ArgumentsPiece,
    CallPiece,
    ContentPiece,
    Function,
    Piece,
    ReasoningPiece,
)
from penstock.stages.models.chat.triggers import Triggers

logger = logging.getLogger(__name__)

_HEAD = re.compile(r'[\s\[\],}]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:parameters|arguments)"\s*:\s*(?=\S)')
_MARK_TOKENS = 16
"""Tokens of a mark at the end of a prompt."""
_TURN_TOKENS = 64
"""Tokens at the end of a prompt in which a template opens a thought, or closes an empty one."""
_PUNCTUATION = "[]{}, \t\r\n"


@dataclass(frozen=True)
class OutputStart:
    """The facts about an output before it begins."""

    functions: Sequence[Function] = ()
    """All that the model may call."""
    prompt: Sequence[int] = ()
    marks: Mapping[str, int] = field(default_factory=dict)
    """The tokens of the vocabulary's marks."""
    thinks: bool = False
    """True if the model continues a thought that was cut."""
    decode: Callable[[Sequence[int]], str] | None = None
    """The text of some tokens, marks included."""
    wants_no_thought: bool = False
    """True if the variables of the template say that the model shall not think."""

    @property
    def names(self) -> list[str]:
        """The names of the functions."""
        return [function["function"]["name"] for function in self.functions]

    def last(self, marks: Iterable[str]) -> str | None:
        """Return the one of some ``marks`` that the prompt ends with, but for white space."""
        end = self.decode(self.prompt[-_MARK_TOKENS:]).rstrip() if self.decode else ""
        return next((mark for mark in marks if end.endswith(mark)), None)

    def latest(self, marks: Iterable[str]) -> str | None:
        """Return the last of some ``marks`` that stands in the prompt after the mark that begins the turn.

        The mark of a turn is the latest one in the prompt that is in none of ``marks``.
        """
        wanted = tuple(filter(None, marks))
        text = self._turn(wanted)
        found = [(text.rfind(mark), mark) for mark in wanted if mark in text]
        return max(found)[1] if found else None

    def _turn(self, wanted: Sequence[str]) -> str:
        texts = {token: mark for mark, token in self.marks.items()}
        begin = len(self.prompt)
        while begin > max(0, len(self.prompt) - _TURN_TOKENS):
            mark = texts.get(self.prompt[begin - 1])
            if mark is not None and not any(mark in each for each in wanted):
                break
            begin -= 1
        tokens = self.prompt[begin:]
        return self.decode(tokens) if self.decode else "".join(texts.get(token, " ") for token in tokens)


def wants_no_thought(variables: Mapping[str, Any]) -> bool:
    """True if the variables of a template turn thoughts off, by the names that families use."""
    switches = [variables[name] for name in ("enable_thinking", "thinking") if isinstance(variables.get(name), bool)]
    return bool(switches) and not any(switches)


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
    def triggers(self) -> Triggers: ...

    @property
    def is_idle(self) -> bool: ...


MakeSyntax: TypeAlias = Callable[[OutputStart], Syntax]
"""A parser as it is registered: a description, or a function, which makes the reader of one output."""


class Guarded:
    """A reader of the operator's: if it fails, the rest of the output is text."""

    def __init__(self, reader: TextParser, name: str) -> None:
        self._reader: TextParser | None = reader
        self._name = name
        self.triggers: Triggers = getattr(reader, "triggers", frozenset())

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

    triggers: Triggers = frozenset()
    is_idle = False


class Answered(NeverIdle):
    """A reader whose thought is the answer if there is no other answer and no call; until then, it is held back."""

    def __init__(self, reader: Syntax) -> None:
        self._reader = reader
        self._held: list[Piece] = []
        self._has_answered = False

    def feed(self, text: str) -> Iterator[Piece]:
        return self._noted(self._reader.feed(text))

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        yield from self._noted(self._reader.finish(cut=cut))
        for piece in self._held:
            yield ContentPiece(piece.text) if isinstance(piece, ReasoningPiece) else piece

    def _noted(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            is_blank = isinstance(piece, ContentPiece) and not piece.text.strip()
            self._has_answered |= not (is_blank or isinstance(piece, ReasoningPiece))
            self._held.append(piece)
            if self._has_answered:
                yield from self._held
                self._held.clear()


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
