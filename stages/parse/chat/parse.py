"""Parse chat models: tokens in, items out, with the parser of vLLM that knows the model's markup.

Malformed output never raises an error.  While vLLM's parser holds nothing back, plain text bypasses it.

White space between items counts as markup, since chat templates put it there.  Blank text never opens an item.  The
text of an item ends before trailing white space, and begins after leading line breaks.  White space is text at the
very beginning of a turn, and at its end if the turn ends with a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import (
    FunctionCallOpened,
    GenerationFinished,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    ReasoningOpened,
    Repair,
    TokenChunk,
    TokenFrame,
    TokenLogprob,
    TurnFinished,
)
from penstock.pipeline.protocol.items import Phase
from penstock.pipeline.protocol.tools import tool_key
from penstock.stages.models.chat.functions import functions
from penstock.stages.models.chat.model import Argued, Called, ChatModel, Piece, Said, Thought
from penstock.stages.models.chat.names import ToolNames, text_argument
from penstock.stages.parse.chat.unwrap import Unwrapped
from penstock.stages.parse.openings import Opening, call_of, is_open
from penstock.stages.parse.text import AlignedLogprobs, ItemText, TokenDecoder

Kind: TypeAlias = type[Thought] | type[Said] | type[Called]


@dataclass(frozen=True)
class ParseChat:
    """The pipeline stage around `ChatParser`."""

    chat: ChatModel

    async def __call__(self, source: AsyncIterator[TokenFrame]) -> AsyncGenerator[ParsedFrame, None]:
        """Parse one generation, or several in a row."""
        parser = ChatParser(self.chat)
        async for frame in source:
            begins = isinstance(frame, GenerationStarted)  # creating vLLM's parser takes time: do it off the event loop
            for parsed in await asyncio.to_thread(parser.feed, frame) if begins else parser.feed(frame):
                yield parsed


@dataclass
class _OpenItem:
    kind: Kind
    text: ItemText
    logprobs: AlignedLogprobs | None = None
    argument: Unwrapped | None = None
    """Extracts the text from the arguments of a call if the tool takes one plain text."""
    repairs: tuple[Repair, ...] = ()
    began_at: int = 0
    length: int = 0
    """Characters of text."""


class _Unclaimed(NamedTuple):
    """A token whose text is not part of a message yet."""

    id: int
    found: TokenLogprob | None
    text: str
    is_mark: bool


class ChatParser:
    """Parses one generation.  Another `GenerationStarted` resets it."""

    def __init__(self, chat: ChatModel) -> None:
        self._chat = chat
        self._tokens_of = chat.vocabulary
        self._marks = frozenset(chat.vocabulary.marks.values())
        self._stops = frozenset(chat.stop_token_ids)
        thinking = chat.parsers.thinking
        self._thinking_ends = chat.vocabulary.marks.get(thinking[1]) if thinking else None
        self._plain: Mapping[int, str] | None = None

    def _begin_turn(self, started: GenerationStarted) -> None:
        self._started = started
        self._names = ToolNames(started.tools)
        callables = started.tools.callable
        self._callable = frozenset(map(tool_key, callables))
        self._parser = self._chat.parsers.start(
            started, functions(replace(started.tools, tools=callables), self._names)
        )
        self._decoder = TokenDecoder(self._tokens_of)
        self._plain = None
        self._item: _OpenItem | None = None
        self._latest: Kind | None = None
        self._margin = ""  # trailing white space of the open item, held back
        self._blank: tuple[Kind, str] = (Said, "")  # leading white space of an item that is not open yet
        self._follows_markup = False
        self._has_called = False
        self._has_thought = False
        """True if the model wrote the end mark of the latest thought."""
        self._has_logprobs = False
        self._unclaimed: list[_Unclaimed] = []
        self._uncounted = 0
        self._reasoning_tokens = 0
        self._tokens: list[int] = []
        self._read_upto = 0
        """The position after the latest token of the open item."""

    def feed(self, frame: TokenFrame) -> Iterable[ParsedFrame]:
        """Take one frame and return the frames that follow from it."""
        if self._plain is None or not isinstance(frame, TokenChunk):
            return self._read(frame)
        text = ""  # the fast path, which nearly every chunk takes
        try:
            for token in frame.token_ids:
                text += self._plain[token]
        except KeyError:  # a mark or a possible beginning of one, white space, or part of a character
            return self._read(frame)
        self._tokens += frame.token_ids
        if self._latest is Thought:
            self._reasoning_tokens += len(frame.token_ids)
        return (ItemDelta(text),)

    def _read(self, frame: TokenFrame) -> Iterable[ParsedFrame]:
        match frame:
            case TokenChunk():
                return self._read_tokens(frame)
            case GenerationStarted():
                self._begin_turn(frame)
                return (frame,)
            case GenerationFinished():
                return self._finish(frame)

    def _read_tokens(self, chunk: TokenChunk) -> Iterable[ParsedFrame]:
        if self._plain is not None:  # the fast path did not update the position
            self._plain, self._read_upto = None, len(self._tokens)
        self._has_logprobs = bool(chunk.logprobs)
        for token, logprob in zip_longest(chunk.token_ids, chunk.logprobs):
            yield from self._read_token(token, logprob)
        if self._item:
            yield from self._item.text.delta()
            if self._is_plain(self._item):
                self._plain = self._chat.vocabulary.plain_texts(self._parser.triggers or frozenset())

    def _is_plain(self, item: _OpenItem) -> bool:
        is_kind = item.kind is self._latest and item.kind is not Called
        return is_kind and self._parser.is_at_rest and self._is_clear and item.text.is_plain

    @property
    def _is_clear(self) -> bool:
        """True if `ChatParser` itself holds no text back."""
        return not (self._margin or self._blank[1] or self._decoder.holds_back)

    def _read_token(self, token: int, logprob: TokenLogprob | None) -> Iterable[ParsedFrame]:
        self._tokens.append(token)
        text = "" if token in self._stops else self._decoder.decode(token)
        is_mark = token in self._marks
        self._uncounted += not is_mark
        if self._has_logprobs:
            self._unclaimed.append(_Unclaimed(token, logprob, text, self._tokens_of.mark(token) is not None))
        if is_mark or not (self._parser.is_at_rest and (self._parser.triggers or frozenset()).isdisjoint(text)):
            for piece in self._parser.feed(token, text):
                yield from self._take(piece)
        elif text:
            yield from self._take(Thought(text) if self._latest is Thought else Said(text))
        if is_mark:
            self._follows_markup = True
        if token == self._thinking_ends and self._latest is Thought:
            self._read_upto = len(self._tokens)
            self._has_thought = True
            self._count()

    def _count(self) -> None:
        if self._latest is Thought:
            self._reasoning_tokens += self._uncounted
        self._uncounted = 0

    # Pieces

    def _take(self, piece: Piece) -> Iterable[ParsedFrame]:
        self._latest = Called if isinstance(piece, Argued) else type(piece)
        self._has_thought = self._has_thought and not isinstance(piece, Thought)
        self._count()
        match piece:
            case Called(name):
                yield from self._call(name)
            case Argued(text):
                self._argue(text)
            case Thought(text) | Said(text):
                yield from self._speak(type(piece), text)

    def _speak(self, kind: Kind, text: str) -> Iterable[ParsedFrame]:
        if self._item and self._item.kind is kind:
            text, self._blank = self._margin + text, (kind, "")
        else:
            text = self._blank[1] + text if self._blank[0] is kind else text
            self._blank = (kind, text)
            if text.isspace():
                return
            self._blank = (kind, "")
            yield from self._open(kind, ReasoningOpened() if kind is Thought else MessageOpened(self._phase))
            text = _behind_breaks(text) if kind is Thought or self._follows_markup else text
        written = text.rstrip()
        self._margin = text[len(written) :]
        self._follows_markup = True
        self._write(written)

    @property
    def _phase(self) -> Phase | None:
        """The phase of a message that opens now: ``"commentary"`` if a call came before it or must follow.

        Otherwise None: the message may be the answer, or a call may still follow it.
        """
        return "commentary" if self._has_called or self._started.tools.choice == "required" else None

    def _call(self, name: str) -> Iterable[ParsedFrame]:
        tool = self._names.tool(name)
        argument = None
        repairs: tuple[Repair, ...] = ()
        opening: Opening
        if tool is None and is_open(self._started.tools):
            opening = FunctionCallOpened(name)
        elif tool is None:
            opening, repairs = ReasoningOpened(name), ("undeclared tool",)
        elif tool_key(tool) in self._callable:
            opening, argument = call_of(tool), text_argument(tool)
        else:
            opening, repairs = ReasoningOpened(), ("undeclared tool",)
        self._has_called = self._has_called or not isinstance(opening, ReasoningOpened)
        self._follows_markup = True
        yield from self._open(Called, opening)
        if self._item:
            self._item.argument = Unwrapped(argument) if argument else None
            self._item.repairs = repairs

    def _argue(self, text: str) -> None:
        if self._item and self._item.kind is Called:
            self._write(self._item.argument.feed(text) if self._item.argument else text)

    # The open item

    def _open(self, kind: Kind, opening: Opening) -> Iterable[ParsedFrame]:
        yield from self._close(complete=True, upto=self._read_upto)
        reports = self._has_logprobs and isinstance(opening, MessageOpened)
        logprobs = AlignedLogprobs(self._tokens_of) if reports else None
        text = ItemText(self._started.stop, logprobs)
        self._item = _OpenItem(kind, text, logprobs, began_at=self._read_upto)
        self._margin = ""
        self._blank = (kind, "")
        yield opening

    def _write(self, text: str) -> None:
        item = self._item
        if item is None or not text:
            return
        if item.logprobs:
            self._claim(text, item.length, item.logprobs)
        self._unclaimed = self._unclaimed if item.logprobs else []
        self._read_upto = len(self._tokens)
        item.length += len(text)
        item.text.write(text)

    def _claim(self, text: str, base: int, logprobs: AlignedLogprobs) -> None:
        """Add the log probabilities of the tokens that spell ``text``, which is at position ``base`` of its item."""
        plain = ["" if token.is_mark else token.text for token in self._unclaimed]
        marked = [token.text for token in self._unclaimed]
        texts = plain if text in "".join(plain) else marked  # a mark that the parser does not know is text
        joined = "".join(texts)
        begin = 0 if joined.startswith(text) else joined.rfind(text)
        end = begin + len(text)
        at = 0
        unclaimed = []
        for token, own in zip(self._unclaimed, texts, strict=True) if begin >= 0 else ():
            start, at = at, at + len(own)
            if start >= end:
                unclaimed.append(token)
            elif at > begin or (start == begin and not own):
                if token.found and (own or not token.is_mark):
                    logprobs.add(token.id, token.found)
                if own:
                    logprobs.settle(base + min(at, end) - begin)
                if at > end:
                    unclaimed.append(token._replace(found=None, text=own[end - start :]))
        self._unclaimed = unclaimed

    def _close(self, *, complete: bool, upto: int) -> Iterable[ParsedFrame]:
        if self._item is None:
            return
        item, self._item = self._item, None
        if item.argument and (rest := item.argument.flush(cut=not complete)):
            item.text.write(rest)
        yield from item.text.close()
        is_as_written = complete and not item.repairs and not item.text.is_cut
        yield ItemClosed(complete, item.repairs, tuple(self._tokens[item.began_at : upto]) if is_as_written else ())

    def _finish(self, finished: GenerationFinished) -> Iterable[ParsedFrame]:
        if self._plain is not None:
            self._plain, self._read_upto = None, len(self._tokens)
        cut = finished.reason in ("length", "cancelled")
        for piece in self._parser.finish(cut=cut):  # an unfinished character is dropped
            yield from self._take(piece)
        if self._item and self._item.kind is Said:
            self._write(self._margin)
        self._check_end(finished)
        yield from self._close(complete=not cut or self._is_whole, upto=0 if cut else len(self._tokens))
        yield TurnFinished(
            reason=finished.reason,
            cached_tokens=finished.cached_tokens,
            output_tokens=len(self._tokens),
            reasoning_tokens=self._reasoning_tokens,
            duration=finished.duration,
            raw_messages=None if self._started.raw_messages is None else (self._chat.raw_message(self._tokens),),
            prompt_tokens=finished.prompt_tokens,
        )

    @property
    def _is_whole(self) -> bool:
        """True if the markup of the open item is complete, so that a cut now does not shorten the item."""
        if self._latest is Called:
            return self._parser.has_called
        return self._has_thought and self._item is not None and self._item.kind is Thought

    def _check_end(self, finished: GenerationFinished) -> None:
        """Raise `EngineFailed` if a turn ends without the call that its grammar requires."""
        must_call = self._started.held_to_grammar and self._started.tools.choice == "required"
        if must_call and finished.reason == "stop" and not self._has_called and not self._started.stop:
            raise EngineFailed("The engine could not hold the model to the grammar of this request to its end.")


def _behind_breaks(text: str) -> str:
    """Return ``text`` without leading blank lines.  The indentation of its first line stays."""
    blank = len(text) - len(text.lstrip())
    return text[text.rfind("\n", 0, blank) + 1 :]
