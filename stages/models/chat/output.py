"""Reading one generation of a chat model: by penstock's own readers, or by a parser of vLLM.

A parser is fed as little as possible.  Plain text bypasses it (see `OutputParser.is_idle`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.stages.models.chat.json_value import ValueEnd
from penstock.stages.models.chat.marks import Marks
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, Piece, ReasoningPiece
from penstock.stages.models.chat.syntaxes import Syntax
from penstock.stages.models.chat.triggers import Triggers, united

if TYPE_CHECKING:
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.parser.abstract_parser import Parser

logger = logging.getLogger(__name__)

_TOKENS_PER_GROWTH = 32
"""Tokens of arguments after which a batch grows by one token.

Several of vLLM's parsers read a whole call again for each token.  Batches that grow with the call keep the total
parsing time linear in its length, and delay only a small part of it.
"""


_BREAK = "\ufdd0"
"""A character of no text, by which a mark that is none is broken while it is read."""


class Spelled:
    """Breaks the marks in text of other tokens: a mark that has a token of its own is a mark only as that token."""

    def __init__(self, marks: Mapping[str, int]) -> None:
        self._tokens = frozenset(marks.values())
        self._marks = Marks(marks)
        self._longest = max(map(len, marks), default=1)
        self._before = ""
        self._has_broken = False

    def feed(self, token: int, text: str) -> str:
        """Take one token, and return its text, in which no mark is that it is not itself."""
        if token in self._tokens or not self._tokens:
            self._before = ""
            return text
        whole, begin = self._before + text, len(self._before)
        self._before = whole[max(0, len(whole) - self._longest + 1) :]
        ends = [at for at in self._ends(whole) if at > begin]
        for at in reversed(ends):
            text = f"{text[: at - begin - 1]}{_BREAK}{text[at - begin - 1 :]}"
        self._has_broken |= bool(ends)
        return text

    def _ends(self, text: str) -> Iterator[int]:
        at = 0
        while found := self._marks.search(text, at):
            yield found.end()
            at = found.end()

    def meant(self, pieces: Iterable[Piece]) -> Sequence[Piece]:
        """Return pieces with the text that the tokens have."""
        return tuple(filter(None, map(self._mended, pieces))) if self._has_broken else tuple(pieces)

    def _mended(self, piece: Piece) -> Piece | None:
        if isinstance(piece, CallPiece):
            return CallPiece(piece.name.replace(_BREAK, ""))
        return None if piece.text == _BREAK else replace(piece, text=piece.text.replace(_BREAK, ""))


class ReadOutput:
    """The `OutputParser` of a generation that a `Syntax` reads; None if all of it is text.

    ``marks`` are those of the syntax that are tokens of the vocabulary.
    """

    def __init__(self, syntax: Syntax | None, marks: Mapping[str, int] | None = None) -> None:
        self._syntax = syntax
        self._spelled = Spelled(marks or {})
        self.triggers: Triggers | None = syntax.triggers if syntax else frozenset()
        self.is_idle = syntax is None

    def feed(self, token: int, text: str) -> Sequence[Piece]:
        if self._syntax is None or not text:
            return [ContentPiece(text)] if text else ()
        pieces = self._spelled.meant(self._syntax.feed(self._spelled.feed(token, text)))
        self.is_idle = self._syntax.is_idle and bool(pieces) and isinstance(pieces[-1], ContentPiece | ReasoningPiece)
        return pieces

    def finish(self, *, cut: bool) -> Sequence[Piece]:
        return self._spelled.meant(self._syntax.finish(cut=cut)) if self._syntax else ()


@dataclass(frozen=True)
class Traits:
    """Known behaviour of a parser of vLLM.

    ``marks`` are the ids of added tokens (see `Vocabulary.marks`), and ``triggers`` are those of `OutputParser`.
    """

    marks: frozenset[int] = frozenset()
    triggers: Triggers | None = None
    takes_batches: bool = False
    """True if several tokens at once give the same result as one by one."""


class ParsedOutput:
    """The `OutputParser` of a generation that a parser of vLLM reads.

    ``syntax`` reads calls from the answer text, if the parser does not read them.
    """

    def __init__(
        self, parser: Parser, request: Any, prompt: Sequence[int], traits: Traits, syntax: Syntax | None = None
    ) -> None:
        self._parser: Parser | None = parser
        self._request = request
        self._prompt = list(prompt)
        self._traits = traits
        self._syntax = syntax
        own = traits.triggers
        self.triggers: Triggers | None = own if own is None or syntax is None else united(own, syntax.triggers)
        self.is_idle = False
        self._batch: list[int] = []
        self._batched = ""
        self._since_mark: int | None = None
        """Tokens since the latest mark in a call; None outside of one."""
        self._unread: list[str] | None = []
        """The text of the output until the parser returns something; None from then on."""
        self._calls = _Calls()
        self._arguments: _Arguments | None = None

    def feed(self, token: int, text: str) -> Sequence[Piece]:
        self._batch.append(token)
        self._batched += text
        if self._since_mark is not None and self._traits.takes_batches:
            self._since_mark = 0 if token in self._traits.marks else self._since_mark + 1
            if len(self._batch) <= self._since_mark // _TOKENS_PER_GROWTH:
                return ()
        return self._read()

    def finish(self, *, cut: bool) -> Sequence[Piece]:
        pieces = list(self._read()) if self._batch else []
        last = self._pieces(self._parsed([], "", finished=True))
        if cut:  # calls that the parser completes now were not completed by the model
            last = [piece for piece in last if isinstance(piece, ReasoningPiece | ContentPiece)]
        pieces += self._interpreted(last)
        if self._unread and not cut:
            pieces += self._interpreted([ContentPiece("".join(self._unread), is_recovered=True)])
        pieces += self._interpreted(self._calls.finish())
        if self._syntax:
            pieces += self._guarded(self._syntax.finish(cut=cut))
        if self._arguments and not cut:
            pieces += self._arguments.finish()
        return pieces

    def _read(self) -> Sequence[Piece]:
        tokens, text = self._batch, self._batched
        self._batch, self._batched = [], ""
        read = self._pieces(self._parsed(tokens, text, finished=False))
        pieces = self._interpreted(read)
        self.is_idle = self._has_come_out(read, text)
        if read:
            self._since_mark = self._since_mark or 0 if isinstance(read[-1], CallPiece | ArgumentsPiece) else None
        return pieces

    def _has_come_out(self, read: list[Piece], text: str) -> bool:
        if not read or not text or self.triggers is None or not self.triggers.isdisjoint(text):
            return False
        match read[-1]:
            case ReasoningPiece(last):
                return last.endswith(text)
            case ContentPiece(last):
                return last.endswith(text) and (self._syntax is None or self._syntax.is_idle)
            case _:
                return False

    # Reading with the parser

    def _parsed(self, tokens: list[int], text: str, *, finished: bool) -> DeltaMessage | str | None:
        """Return the parser's delta, or plain text if it has failed."""
        if self._parser is None:
            return text
        try:
            delta = self._parser.parse_delta(text, tokens, self._request, self._prompt, finished=finished)
        except (
            Exception
        ):  # the parser may be vLLM's or the operator's, and the model's text is the client's all the same
            logger.warning("A parser failed: the rest of the output is passed on as text", exc_info=True)
            self._parser = None
            return "".join(self._unread or ()) + text
        if self._unread is not None and text:
            self._unread.append(text)
        return delta

    def _pieces(self, delta: DeltaMessage | str | None) -> list[Piece]:
        if delta is None or isinstance(delta, str):
            pieces: list[Piece] = [ContentPiece(delta)] if delta else []
        else:
            pieces = list(self._calls.pieces(delta))
        if pieces:
            self._unread = None
        return pieces

    # Correcting its result

    def _interpreted(self, read: Iterable[Piece]) -> list[Piece]:
        if self._syntax:
            read = [piece for parsed in read for piece in _in_syntax(parsed, self._syntax)]
        return list(self._guarded(read))

    def _guarded(self, read: Iterable[Piece]) -> Iterator[Piece]:
        """Correct the arguments of calls: end them after the JSON value, and supply ``{}`` if there are none."""
        for piece in read:
            match piece:
                case CallPiece():
                    if self._arguments:
                        yield from self._arguments.finish()
                    self._arguments = _Arguments()
                    yield piece
                case ArgumentsPiece(text):
                    if self._arguments:
                        yield from self._arguments.feed(text)
                case ReasoningPiece(text) | ContentPiece(text):
                    if self._arguments and text.strip():
                        yield from self._arguments.finish()
                        self._arguments = None
                    yield piece
                case _:
                    yield piece


class _Arguments:
    """The JSON arguments of one call, without text that the parser appends; ``{}`` if the model wrote none."""

    def __init__(self) -> None:
        self._end = ValueEnd()

    def feed(self, text: str) -> Iterator[Piece]:
        if not self._end.found:
            end = self._end.feed(text)
            if self._end.began:
                yield ArgumentsPiece(text[:end])

    def finish(self) -> Iterator[Piece]:
        if not self._end.began:
            yield ArgumentsPiece("{}")


class _Calls:
    """The calls in a parser's deltas, which may have arguments before the name."""

    def __init__(self) -> None:
        self._called: set[int] = set()
        self._early: dict[int, str] = {}

    def pieces(self, delta: DeltaMessage) -> Iterator[Piece]:
        """Return the pieces of a delta."""
        if delta.reasoning:
            yield ReasoningPiece(delta.reasoning)
        if delta.content:
            yield ContentPiece(delta.content)
        for call in delta.tool_calls or ():
            if call.function is None:
                continue
            if call.function.name and call.index not in self._called:
                self._called.add(call.index)
                yield CallPiece(call.function.name.strip())
                yield from map(ArgumentsPiece, filter(None, [self._early.pop(call.index, "")]))
            if call.function.arguments:
                if call.index in self._called:
                    yield ArgumentsPiece(call.function.arguments)
                else:
                    self._early[call.index] = self._early.get(call.index, "") + call.function.arguments

    def finish(self) -> Iterator[Piece]:
        """Return as text the arguments of calls that have got no name."""
        yield from map(ContentPiece, self._early.values())


def _in_syntax(piece: Piece, syntax: Syntax) -> Iterable[Piece]:
    return syntax.feed(piece.text) if isinstance(piece, ContentPiece) else (piece,)
