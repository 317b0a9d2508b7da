"""Parse chat models: tokens in, items out, through a reader of `forms`, or vLLM's parser.

Malformed output never raises an error.  While the reader holds nothing back, plain text bypasses it.

White space between items counts as markup, since chat templates put it there.  Blank text never opens an item.  The
text of an item ends before trailing white space, and begins after leading line breaks.  White space is text at the
very beginning of a turn, and at its end if the turn ends with a message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeAlias

from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.hot_path import on_the_way
from penstock.pipeline.protocol.items import Phase
from penstock.pipeline.protocol.tools import tool_key
from penstock.stages.models.chat.functions import functions
from penstock.stages.models.chat.json_value import is_json_object, missing_brackets
from penstock.stages.models.chat.model import (
    ArgumentsPiece,
    CallPiece,
    ChatModel,
    ContentPiece,
    DroppedPiece,
    Piece,
    ReasoningPiece,
)
from penstock.stages.models.chat.names import ToolNames, text_argument
from penstock.stages.models.chat.triggers import Triggers
from penstock.stages.models.chat.vocabulary import Vocabulary
from penstock.stages.models.opened_calls import call_of
from penstock.stages.models.refusals import refusal_of
from penstock.stages.parse.chat.logprobs import UnclaimedTokens
from penstock.stages.parse.chat.unwrap import Unwrapped
from penstock.stages.parse.parser import Opening, ParseStage, TurnParser, grammar_broken
from penstock.stages.parse.plain import PlainParser
from penstock.stages.parse.text import AlignedLogprobs, ItemText, TokenDecoder

_SLOW_SECONDS = 0.004
"""Seconds of a step after which the next one runs in a thread."""

_LONG_TOKENS = 500
"""Tokens since plain text after which a step that ends a call runs in a thread."""

TextPiece: TypeAlias = ReasoningPiece | ContentPiece


@on_the_way
@dataclass(frozen=True)
class ParseChat(ParseStage):
    """The pipeline stage around `ChatParser`."""

    chat: ChatModel

    @property
    def vocabulary(self) -> Vocabulary:
        """That of the model."""
        return self.chat.vocabulary

    async def _begin(self, started: frames.GenerationStarted) -> TurnParser:
        if (raw := started.facts.raw) is not None:
            return PlainParser(self.chat.vocabulary, started, raw)
        return await asyncio.to_thread(ChatParser, self.chat, started)  # making a parser takes time


@dataclass(slots=True)
class _NoItem:
    follows_markup: bool = False
    read_upto: int = 0


@dataclass(slots=True)
class _OpenText:
    kind: type[TextPiece]
    text: ItemText
    began_at: int
    read_upto: int
    """The position after the latest token of the item, where the next item begins."""
    margin: str = ""
    """Trailing white space, held back: it is text only if more text follows."""
    is_whole: bool = False
    """True if the model wrote the end mark of this reasoning."""
    repairs: tuple[frames.Repair, ...] = ()


@dataclass(slots=True)
class _OpenCall:
    """A call is open, or text in the form of a call that may not be made."""

    text: ItemText
    began_at: int
    read_upto: int
    argument: Unwrapped | None
    """Extracts the text from the arguments if the tool takes one plain text."""
    repairs: tuple[frames.Repair, ...]
    arguments: list[str] = field(default_factory=list)
    """The arguments as JSON, in pieces."""
    is_explained: bool = True
    """False if some text of the call is in no form of the family."""


_State: TypeAlias = _NoItem | _OpenText | _OpenCall


class ChatParser(TurnParser):
    """Parses one generation."""

    def __init__(self, chat: ChatModel, started: frames.GenerationStarted) -> None:
        super().__init__(chat.vocabulary, started)
        self._chat = chat
        self._started = started
        self._names = ToolNames(started.facts.tools)
        callables = started.facts.tools.callable
        self._callable = frozenset(map(tool_key, callables))
        self._parser = chat.parsers.start(
            started, functions(replace(started.facts.tools, tools=callables), self._names)
        )
        self._triggers: Triggers = self._parser.triggers or frozenset()
        self._decoder = TokenDecoder(chat.vocabulary)
        self._state: _State = _NoItem()
        self._latest: type[TextPiece | CallPiece] = ContentPiece
        """The kind of the latest piece, which may be too blank to open an item."""
        self._blank: TextPiece = ContentPiece("")
        """Leading white space of an item that is not open yet."""
        self._has_called = False
        self._unclaimed: UnclaimedTokens | None = None
        """None if the request wants no log probabilities, or the engine reports none."""
        self._uncounted = 0
        """Tokens that are not added to those of reasoning yet, as the next piece decides that."""
        self._was_slow = False
        """True if the latest step took more than `_SLOW_SECONDS` seconds."""
        self._plain_upto = 0
        """The position at which the latest run of plain text ended."""
        self._plain_from = 0
        """The position at which the latest run of plain text began."""

    def feed(self, frame: frames.EngineFrame) -> Iterator[frames.ParsedFrame]:
        """Take one frame and return the frames that follow from it."""
        read, spent = super().feed(frame), 0.0
        while True:
            began = time.perf_counter()
            parsed = next(read, None)
            spent += time.perf_counter() - began  # without the time that the consumer takes between frames
            if parsed is None:
                break
            yield parsed
        self._was_slow = spent > _SLOW_SECONDS

    def is_slow(self, frame: frames.EngineFrame) -> bool:
        """Return True after a slow step, and if a long call may end: several parsers then read all of it again."""
        if self._was_slow:
            return True
        is_long = len(self._tokens) - self._plain_upto > _LONG_TOKENS
        marks = self._chat.vocabulary.mark_ids
        return is_long and (not isinstance(frame, frames.TokenChunk) or not marks.isdisjoint(frame.token_ids))

    def _read(self, chunk: frames.TokenChunk) -> Iterator[frames.ParsedFrame]:
        self._end_plain_text()
        if self._wants_logprobs and chunk.logprobs and self._unclaimed is None:
            self._unclaimed = UnclaimedTokens()
        for token, logprob in zip_longest(chunk.token_ids, chunk.logprobs):
            yield from self._read_token(token, logprob)
            if self._is_stopped:
                break
        if not isinstance(self._state, _NoItem):
            yield from self._state.text.delta()
        if isinstance(self._state, _OpenText) and self._is_plain(self._state):
            self._plain_texts, self._plain_from = self._chat.vocabulary.plain_texts(self._triggers), len(self._tokens)

    def _is_plain(self, item: _OpenText) -> bool:
        """Return True if neither this parser nor vLLM's holds any text back."""
        is_held_back = item.margin or self._blank.text or self._decoder.holds_back or not self._parser.is_idle
        return item.kind is self._latest and item.text.is_plain and not is_held_back

    def _end_plain_text(self) -> None:
        """Catch up with the tokens of the hot path."""
        if self._plain_texts is not None:
            self._reasoning_tokens += self._open_reasoning_tokens
            self._plain_texts, self._state.read_upto = None, len(self._tokens)
            self._plain_upto = len(self._tokens)

    def _read_token(self, token: int, logprob: frames.TokenLogprob | None) -> Iterator[frames.ParsedFrame]:
        vocabulary = self._chat.vocabulary
        self._tokens.append(token)
        text = "" if token in self._chat.stop_token_ids else self._decoder.decode(token)
        is_mark = token in vocabulary.mark_ids
        self._uncounted += not is_mark
        if self._unclaimed is not None:
            self._unclaimed.add(token, logprob, text, is_mark=vocabulary.mark(token) is not None)
        if is_mark or not (self._parser.is_idle and self._triggers.isdisjoint(text)):
            for piece in self._parser.feed(token, text):
                yield from self._take(piece)
        elif text:
            yield from self._take(ReasoningPiece(text) if self._latest is ReasoningPiece else ContentPiece(text))
        if is_mark and isinstance(self._state, _NoItem):
            self._state.follows_markup = True
        if token == self._chat.reasoning_end and self._latest is ReasoningPiece:
            self._state.read_upto = len(self._tokens)
            if isinstance(self._state, _OpenText):
                self._state.is_whole = self._state.kind is ReasoningPiece
            self._count()

    @property
    def _open_reasoning_tokens(self) -> int:
        is_plain_thought = self._plain_texts is not None and self._latest is ReasoningPiece
        return len(self._tokens) - self._plain_from if is_plain_thought else 0

    def _count(self) -> None:
        if self._latest is ReasoningPiece:
            self._reasoning_tokens += self._uncounted
        self._uncounted = 0

    # All transitions between the states

    def _take(self, piece: Piece) -> Iterator[frames.ParsedFrame]:
        if self._is_stopped:
            return
        if not isinstance(piece, DroppedPiece):
            self._latest = CallPiece if isinstance(piece, ArgumentsPiece) else type(piece)
        self._count()
        match piece:
            case CallPiece(name):
                yield from self._call(name)
            case ArgumentsPiece(text):
                if isinstance(self._state, _OpenCall):
                    self._state.is_explained &= not piece.is_unexplained
                    self._state.arguments.append(text)
                    argument = self._state.argument
                    self._write(self._state, argument.feed(text) if argument else text)
            case DroppedPiece():
                self._note("empty call", self if isinstance(self._state, _NoItem) else self._state)
            case ReasoningPiece() | ContentPiece():
                yield from self._take_text(piece)
        is_recovered = isinstance(piece, ContentPiece | ArgumentsPiece) and piece.is_recovered
        if is_recovered and not isinstance(self._state, _NoItem):
            self._note("unread output", self._state)

    def _note(self, repair: frames.Repair, place: ChatParser | _OpenText | _OpenCall) -> None:
        """Note a repair at its item, or at the turn if no item is open."""
        if repair not in place.repairs:
            place.repairs = (*place.repairs, repair)

    def _take_text(self, piece: TextPiece) -> Iterator[frames.ParsedFrame]:
        kind, text, item = type(piece), piece.text, self._state
        if isinstance(item, _OpenText) and item.kind is kind:
            text = item.margin + text
        else:
            text = self._blank.text + text if isinstance(self._blank, kind) else text
            if text.isspace():
                self._blank = kind(text)
                return
            if not self._is_at_beginning(kind, item):
                text = _after_line_breaks(text)
            opening = frames.ReasoningOpened() if kind is ReasoningPiece else frames.MessageOpened(self._phase)
            yield from self._close(complete=True, upto=item.read_upto)
            item = self._state = _OpenText(kind, self._text_of(opening), item.read_upto, item.read_upto)
            yield opening
        self._blank = kind("")
        written = text.rstrip()
        item.margin, item.is_whole = text[len(written) :], False
        self._write(item, written)
        if item.text.would_be_cut_by(item.margin):
            self._write(item, item.margin)
        if item.text.is_cut:
            yield from self._close(complete=True, upto=item.read_upto)

    def _is_at_beginning(self, kind: type[TextPiece], item: _State) -> bool:
        """Return True for the text at the very beginning of a turn; a thought is one only if it goes on."""
        is_first = isinstance(item, _NoItem) and not item.follows_markup
        thinks = self._started.chat is not None and self._started.chat.thinks
        return is_first and (thinks or kind is ContentPiece)

    def _call(self, name: str) -> Iterator[frames.ParsedFrame]:
        tool = self._names.tool(name)
        opening: Opening
        if tool is not None and tool_key(tool) in self._callable:
            opening = call_of(tool)
        else:
            callables = map(self._names.of, self._started.facts.tools.callable)
            opening = frames.ReasoningOpened(name, refusal_of(name, callables, exists=tool is not None))
        is_call = not isinstance(opening, frames.ReasoningOpened)
        argument = text_argument(tool) if tool and is_call else None
        self._has_called |= is_call
        self._blank = ContentPiece("")
        position = self._state.read_upto
        yield from self._close(complete=True, upto=position)
        self._state = _OpenCall(
            self._text_of(opening),
            began_at=position,
            read_upto=position,
            argument=Unwrapped(argument) if argument else None,
            repairs=() if is_call else ("undeclared tool",),
        )
        yield opening

    def _finish(self, finished: frames.GenerationFinished) -> Iterator[frames.ParsedFrame]:
        self._end_plain_text()
        is_cut = finished.reason in ("length", "cancelled")
        for piece in () if self._is_stopped else self._parser.finish(cut=is_cut):  # an unfinished character is dropped
            yield from self._take(piece)
        if isinstance(self._state, _OpenText) and self._state.kind is ContentPiece:
            self._write(self._state, self._state.margin)
        self._check_end(finished)
        yield from self._close(complete=not is_cut or self._is_whole, upto=0 if is_cut else len(self._tokens))
        raw_messages = None if self._started.raw_messages is None else (self._chat.raw_message(self._tokens),)
        yield self._turn_finished(finished, raw_messages)

    def _close(self, *, complete: bool, upto: int) -> Iterator[frames.ParsedFrame]:
        """Close the open item, if there is one; its tokens end at position ``upto``."""
        item, self._state = self._state, _NoItem(follows_markup=True, read_upto=upto)
        if isinstance(item, _NoItem):
            return
        if isinstance(item, _OpenCall):
            complete = complete and ("undeclared tool" in item.repairs or self._completed(item))
        if isinstance(item, _OpenCall) and item.argument:
            item.text.write(item.argument.flush(cut=not complete))
            item.repairs += ("wrapped input",) if item.argument.is_repaired else ()
        yield from item.text.close()
        self._stopped_by = item.text.cut_by
        is_as_written = complete and not item.repairs and not self._is_stopped
        tokens = self._tokens[item.began_at : upto] if is_as_written else ()
        yield frames.ItemClosed(complete, item.repairs, tuple(tokens), self._is_stopped)

    def _completed(self, call: _OpenCall) -> bool:
        """Complete the arguments of a call if only brackets are missing; return True if they are whole then."""
        arguments = "".join(call.arguments)
        if not call.is_explained:
            return False
        if is_json_object(arguments):
            return True
        if call.argument and arguments.strip() and not arguments.lstrip().startswith("{"):
            return True  # the plain text of the tool
        missing = missing_brackets(arguments)
        if arguments.rstrip().endswith(("{", "[")):
            return False  # nothing stands in the bracket that the model opened last
        if not (missing and is_json_object(arguments + missing)):
            return False
        self._write(call, call.argument.feed(missing) if call.argument else missing)
        call.repairs = (*call.repairs, "missing end")
        return True

    # The open item

    @property
    def _phase(self) -> Phase | None:
        """The phase of a message that opens now: ``"commentary"`` if a call came before it or must follow.

        Otherwise None: the message may be the answer, or a call may still follow it.
        """
        return "commentary" if self._has_called or self._started.facts.tools.choice == "required" else None

    def _text_of(self, opening: Opening) -> ItemText:
        reports = self._unclaimed is not None and isinstance(opening, frames.MessageOpened)
        return ItemText(self._stop_strings(opening), AlignedLogprobs(self._chat.vocabulary) if reports else None)

    def _write(self, item: _OpenText | _OpenCall, text: str) -> None:
        if not text:
            return
        if self._unclaimed is not None:
            self._unclaimed.claim(text, item.text)
        item.read_upto = len(self._tokens)
        item.text.write(text)

    @property
    def _is_whole(self) -> bool:
        """True if the markup of the open item is complete, so that a cut now does not shorten the item."""
        if isinstance(self._state, _OpenCall):
            return self._state.is_explained and is_json_object("".join(self._state.arguments))
        return isinstance(self._state, _OpenText) and self._state.is_whole

    def _check_end(self, finished: frames.GenerationFinished) -> None:
        """Raise `EngineFailed` if a turn ends without the call that its grammar requires."""
        must_call = self._started.held_to_grammar and self._started.facts.tools.choice == "required"
        is_cut = finished.reason != "stop" or self._started.facts.sampling.stops_anywhere
        if must_call and not is_cut and not self._has_called:
            raise grammar_broken()


def _after_line_breaks(text: str) -> str:
    """Return ``text`` without leading blank lines.  The indentation of its first line stays."""
    blank = len(text) - len(text.lstrip())
    return text[text.rfind("\n", 0, blank) + 1 :]
