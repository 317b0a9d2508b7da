"""Reading one generation of a chat model with a vLLM parser, and correcting the parser's known mistakes.

The parser is fed as little as possible.  Plain text bypasses it (see `OutputParser.is_idle`).  The arguments of a
long call are fed in batches, because several parsers read the whole call again for each token.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.stages.models.chat.json_value import ValueEnd
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, Piece, ReasoningPiece
from penstock.stages.models.chat.syntaxes import NeverIdle, Syntax

if TYPE_CHECKING:
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.parser.abstract_parser import Parser

logger = logging.getLogger(__name__)

_BATCH_GROWS_EVERY = 32
"""Tokens of arguments after which a batch grows by one token.

Batches that grow with the call keep the total parsing time linear in its length, and delay only a small part of it.
"""


@dataclass(frozen=True)
class Traits:
    """Known behaviour of a parser.

    ``marks`` are the ids of added tokens (see `Vocabulary.marks`), and ``triggers`` are those of `OutputParser`.
    """

    marks: frozenset[int] = frozenset()
    triggers: frozenset[str] | None = None
    takes_batches: bool = False
    """True if several tokens at once give the same result as one by one."""
    appends_text: bool = False
    """True if the parser returns the text after a call as more of its arguments."""
    rereads: bool = False
    """True if the parser may find more in the whole output than in its pieces."""


class ParsedOutput:
    """The `OutputParser` of one generation.  ``parser`` is None if the output is plain text.

    ``syntax`` reads calls from the answer text, if the parser does not read them.  ``new_parser`` makes one for the
    output after a call, if the old one would find only further calls there.
    """

    def __init__(
        self,
        parser: Parser | None,
        request: Any,
        prompt: Sequence[int],
        traits: Traits,
        syntax: Syntax | None = None,
        new_parser: Callable[[], Parser | None] | None = None,
    ) -> None:
        self._parser = parser
        self._request = request
        self._prompt = list(prompt)
        self._traits = traits
        self._syntax = syntax
        self._new_parser = new_parser
        own = traits.triggers if parser else frozenset()
        self.triggers: frozenset[str] | None = own if own is None or syntax is None else own | syntax.triggers
        self.is_idle = False
        self._batch: list[int] = []
        self._batched = ""
        self._since_mark: int | None = None
        """Tokens since the latest mark in a call; None outside of one."""
        self._silent = ""
        """The text read since the parser last returned something."""
        self._has_silent_words = False
        """True if that text is more than marks and white space."""
        self._written: list[str] = []
        self._returned: list[Piece] = []
        self._calls = _Calls()
        self._arguments: _Arguments | None = None

    @property
    def has_called(self) -> bool:
        return self._arguments is not None and self._arguments.have_ended

    def feed(self, token: int, text: str) -> Sequence[Piece]:
        self._batch.append(token)
        self._batched += text
        self._has_silent_words |= token not in self._traits.marks and bool(text.strip())
        if self._since_mark is not None and self._traits.takes_batches:
            self._since_mark = 0 if token in self._traits.marks else self._since_mark + 1
            if len(self._batch) <= self._since_mark // _BATCH_GROWS_EVERY:
                return ()
        pieces = self._read()
        is_behind = not pieces and token in self._traits.marks and self._since_mark is not None and self.has_called
        if self._new_parser and is_behind:
            self._begin_anew(self._new_parser())
        return pieces

    def _begin_anew(self, parser: Parser | None) -> None:
        self._parser = parser
        self._since_mark, self._silent = None, ""
        self._written, self._returned, self._calls = [], [], _Calls()

    def finish(self, *, cut: bool) -> Sequence[Piece]:
        pieces = list(self._read()) if self._batch else []
        last = self._pieces(self._parsed([], "", finished=True))
        if cut:  # calls that the parser completes now were not completed by the model
            last = [piece for piece in last if isinstance(piece, ReasoningPiece | ContentPiece)]
        pieces += self._interpreted(last)
        if self._traits.rereads and not cut and self._silent and (reread := self._interpreted(self._reread())):
            pieces += reread
        elif self._is_lost and not cut:
            pieces += self._interpreted([ContentPiece(self._silent, is_recovered=True)])
        else:
            pieces += self._interpreted(self._calls.finish())
        if self._syntax:
            pieces += self._guarded(self._syntax.finish(cut=cut))
        if self._arguments and not cut:
            pieces += self._arguments.finish()
            if (begun := self._arguments.text) and not self._arguments.have_ended and self._syntax is None:
                pieces += self._rest_of_arguments(begun)
        return pieces

    @property
    def _is_lost(self) -> bool:
        """True if the parser has returned nothing for the latest words, and no call has come before them."""
        return self._has_silent_words and bool(self._silent) and self._arguments is None

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
        """Return the parser's delta, or plain text if there is no parser or it has failed."""
        self._silent += text
        if self._parser is None:
            return text
        self._written.append(text)
        try:
            return self._parser.parse_delta(text, tokens, self._request, self._prompt, finished=finished)
        except Exception:
            logger.warning("A parser failed: the rest of the output is passed on as text", exc_info=True)
            self._parser = None
            return self._silent

    def _pieces(self, delta: DeltaMessage | str | None) -> list[Piece]:
        if delta is None or isinstance(delta, str):
            pieces: list[Piece] = [ContentPiece(delta)] if delta else []
        else:
            pieces = list(self._calls.pieces(delta))
        if pieces:
            self._silent, self._has_silent_words = "", False
        if self._traits.rereads:
            self._returned += pieces
        return pieces

    def _reread(self) -> Iterator[Piece]:
        """Pieces that the parser finds in the whole output but did not find while streaming.

        Nothing, if the whole output contradicts the pieces that were already returned.
        """
        reasoning, content, calls = self._whole()
        returned_calls = sum(isinstance(piece, CallPiece) for piece in self._returned)
        if (reasoning or "").strip() != _text(self._returned, ReasoningPiece).strip() or len(
            calls or ()
        ) < returned_calls:
            return
        text = _text(self._returned, ContentPiece)
        if content and content.startswith(text):
            yield from [ContentPiece(content.removeprefix(text))] if content != text else ()
        for call in (calls or ())[returned_calls:]:
            yield CallPiece(call.name)
            yield ArgumentsPiece(call.arguments)

    def _rest_of_arguments(self, begun: str) -> Iterator[Piece]:
        """Complete the arguments of the last call, if the whole output shows how they go on."""
        calls = self._whole()[2]
        if not calls:
            return
        whole = calls[-1].arguments
        # vLLM's DeepSeek parser takes an argument out of an undeclared one that holds it, after it has begun that one
        for end in (whole.removeprefix(begun), f"{whole}}}"):
            if _is_json(begun + end):
                yield ArgumentsPiece(end, is_recovered=True)
                return

    def _whole(self) -> tuple[str | None, str | None, Sequence[Any] | None]:
        """Return the reasoning, the content and the calls that the parser finds in the whole output."""
        if self._parser is None:
            return None, None, None
        try:
            reasoning, content, calls = self._parser.parse(
                "".join(self._written), self._request, enable_auto_tools=True
            )
        except Exception:
            logger.warning("A parser failed on a whole output", exc_info=True)
            return None, None, None
        return reasoning, content, calls

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
                    self._arguments = _Arguments(appends_text=self._traits.appends_text)
                    yield piece
                case ArgumentsPiece(text):
                    if self._arguments:
                        yield from self._arguments.feed(text)
                case ReasoningPiece(text) | ContentPiece(text):
                    if self._arguments and text.strip():
                        yield from self._arguments.finish()
                        self._arguments = None
                    yield piece


class WholeOutput(NeverIdle):
    """The syntax of a parser that only reads whole calls: nothing is returned before the end.

    Calls begin with the pattern ``begins``, and end with the mark ``end``.  Each is read by itself, as such a parser
    drops the text around calls.  One that was cut is left out.
    """

    def __init__(self, parser: Parser, request: Any, begins: str, end: str) -> None:
        self._parser = parser
        self._request = request
        self._call = re.compile(rf"{begins}.*?(?:{re.escape(end)}|\Z)", re.DOTALL)
        self._end = end
        self._text = ""

    def feed(self, text: str) -> Iterator[Piece]:
        self._text += text
        yield from ()

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        position = 0
        for call in self._call.finditer(self._text):
            if before := self._text[position : call.start()]:
                yield ContentPiece(before)
            if call[0].endswith(self._end) or not cut:
                yield from self._read(call[0])
            position = call.end()
        if rest := self._text[position:]:
            yield ContentPiece(rest)

    def _read(self, text: str) -> Iterator[Piece]:
        try:
            _, content, calls = self._parser.parse(text, self._request, enable_auto_tools=True)
        except Exception:
            logger.warning("A parser failed: the output is passed on as text", exc_info=True)
            content, calls = text, None
        if not calls:
            yield ContentPiece(content or text)
        for call in calls or ():
            yield CallPiece(call.name)
            yield ArgumentsPiece(call.arguments)


class _Arguments:
    """The JSON arguments of one call, without text that the parser appends; ``{}`` if the model wrote none."""

    def __init__(self, *, appends_text: bool) -> None:
        self._appends_text = appends_text
        self._end = ValueEnd()
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The arguments so far."""
        return "".join(self._texts)

    @property
    def have_ended(self) -> bool:
        return self._end.found

    def feed(self, text: str) -> Iterator[Piece]:
        rest = text
        if not self._end.found:
            end = self._end.feed(text)
            if self._end.began:
                self._texts.append(text[:end])
                yield ArgumentsPiece(text[:end])
            rest = "" if end is None else text[end:]
        if rest and self._appends_text:
            yield ContentPiece(rest)

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


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _text(pieces: Iterable[Piece], kind: type[ReasoningPiece] | type[ContentPiece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))
