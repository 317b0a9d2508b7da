"""Parse Harmony: token ids in, items out.

The parser works on token ids, so that it cannot confuse a marker with text that looks like one.  It has three states:
in a header, in content, and between messages.  It never raises an error on output that no grammar constrained.  Wrong
markup is repaired, and the repair is named in `ItemClosed.repairs`.  Every text token ends up in an item, and the
deltas of an item sum to its text.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import (
    GenerationFinished,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    ReasoningOpened,
    TokenChunk,
    TokenFrame,
    TokenIds,
    TurnFinished,
)
from penstock.pipeline.protocol.tools import Toolset
from penstock.stages.models.harmony.vocabulary import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    END_OF_TEXT,
    MESSAGE,
    RETURN,
    START,
    TEXT_TOKENS,
    HarmonyEncoding,
)
from penstock.stages.parse.harmony.header import Header, Reading, raw, read_bare, read_header
from penstock.stages.parse.harmony.recipients import Recipients
from penstock.stages.parse.openings import Opening
from penstock.stages.parse.text import TokenText

_CLOSING = frozenset({END, RETURN, CALL, END_OF_TEXT})

_BREAKING_OFF = frozenset({RETURN, END_OF_TEXT})
"""If a turn's grammar fails, the engine ends the turn with its end-of-sequence token, which is one of these."""

_LONG_HEADER = 64
"""Tokens.  A header of this length that holds text is an answer without its markup, and is streamed from then on.  A
header of this length that holds only header words may still be a call: a function name has up to 64 characters, and in
a hexadecimal name each may be a token."""

_LONGEST_HEADER = 256
"""Tokens.  Anything of this length is not a header."""

_LOOK_EVERY = 16
"""Tokens between two checks of a long header: each check reads all of it."""

_NO_RECIPIENTS = Recipients(Toolset())


@dataclass(frozen=True)
class ParseHarmony:
    """The pipeline stage around `HarmonyParser`."""

    encoding: HarmonyEncoding

    async def __call__(self, source: AsyncIterator[TokenFrame]) -> AsyncGenerator[ParsedFrame, None]:
        """Parse one generation, or several in a row."""
        parser = HarmonyParser(self.encoding)
        async for frame in source:
            delta = parser.plain(frame)
            if delta is not None:
                yield delta
                continue
            for parsed in parser.feed(frame):
                yield parsed


@dataclass(slots=True)
class _OpenItem:
    opening: Opening
    reading: Reading
    text: TokenText
    opened_at: int
    """The position after the token that opened it."""


class HarmonyParser:
    """Parses one generation, whose prompt ended in ``<|start|>assistant``.  Another `GenerationStarted` resets it."""

    def __init__(self, encoding: HarmonyEncoding) -> None:
        self._encoding = encoding
        self._token_texts = encoding.token_texts
        self._recipients = _NO_RECIPIENTS
        self._stops: tuple[str, ...] = ()
        self._held_to_grammar = False
        self._raw_messages: list[dict[str, Any]] | None = None
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._has_logprobs = False
        self._header: Header | None = Header()
        self._item: _OpenItem | None = None
        self._is_plain = False
        self._tokens = array("i")  # 4 bytes per token; a list would keep the int objects alive, about 40 bytes each
        self._position = 0  # tokens parsed so far; the fast path does not update it
        self._began_at = 0  # the position of the latest message, after its <|start|>
        self._reasoning_tokens = 0

    def plain(self, frame: TokenFrame) -> ItemDelta | None:
        """Return the delta for a chunk of plain text; None for any other frame, which `feed` has to read.

        Nearly every chunk takes this fast path.  It is one function and returns a single frame, because an extra call
        or loop would be noticeable at every token.
        """
        if not self._is_plain or type(frame) is not TokenChunk:
            return None
        text = ""
        try:
            for token in frame.token_ids:
                text += self._token_texts[token]
        except KeyError:  # a marker, or part of a character
            return None
        self._tokens.extend(frame.token_ids)
        return ItemDelta(text)

    def feed(self, frame: TokenFrame) -> Iterable[ParsedFrame]:
        """Take one frame and return the frames that follow from it."""
        match frame:
            case TokenChunk():
                return self._read_tokens(frame)
            case GenerationStarted():
                self._begin_turn()
                self._recipients = Recipients(frame.tools)
                self._stops = frame.stop
                self._held_to_grammar = frame.held_to_grammar
                self._raw_messages = None if frame.raw_messages is None else []
                return (frame,)
            case GenerationFinished():
                return self._finish(frame)

    def _read_tokens(self, chunk: TokenChunk) -> Iterable[ParsedFrame]:
        self._has_logprobs = bool(chunk.logprobs)
        self._position = len(self._tokens)
        self._tokens.extend(chunk.token_ids)
        for token, logprob in zip_longest(chunk.token_ids, chunk.logprobs):
            self._position += 1
            if self._item and token < TEXT_TOKENS:
                self._item.text.add(token, logprob)
            elif self._item:
                yield from self._item.text.delta()
                yield from self._read_marker(token, self._item.reading)
            else:
                yield from self._read_header(token)
        if self._item:
            yield from self._item.text.delta()
        self._is_plain = self._item is not None and self._item.text.is_plain

    def _finish(self, finished: GenerationFinished) -> Iterable[ParsedFrame]:
        cut = finished.reason in ("length", "cancelled")
        self._position = len(self._tokens)
        if self._header is not None:
            yield from self._open_bare(self._header, "final", cut=True)
        yield from self._close(complete=not cut, marked=False)
        yield TurnFinished(
            reason=finished.reason,
            cached_tokens=finished.cached_tokens,
            output_tokens=len(self._tokens),
            reasoning_tokens=self._reasoning_tokens,
            duration=finished.duration,
            raw_messages=None if self._raw_messages is None else tuple(self._raw_messages),
            prompt_tokens=finished.prompt_tokens,
        )

    def _check_end(self, token: int) -> None:
        """Raise `EngineFailed` if ``token`` ends the turn at a point where its grammar does not allow that."""
        if not self._held_to_grammar or token not in _BREAKING_OFF:
            return
        if self._item is None or self._item.opening != MessageOpened("final_answer"):
            raise EngineFailed("The engine could not hold the model to the grammar of this request to its end.")

    # In content

    def _read_marker(self, token: int, reading: Reading) -> Iterable[ParsedFrame]:
        if token in _CLOSING:
            self._check_end(token)
            yield from self._close(complete=True)
        elif token in (START, CHANNEL):
            reading.repairs.setdefault("missing end")
            yield from self._close(complete=True)
            yield from self._read_header(token)
        else:
            reading.repairs.setdefault("stray marker")

    def _close(self, *, complete: bool, marked: bool = True) -> Iterable[ParsedFrame]:
        if self._item is None:
            return
        item, self._item = self._item, None
        yield from item.text.close()
        repairs = tuple(item.reading.repairs)
        yield ItemClosed(complete, repairs, self._message_tokens() if marked and not repairs else ())
        if isinstance(item.opening, ReasoningOpened):
            thought = self._position - item.opened_at - marked
            self._reasoning_tokens += max(0, thought)  # a bare message ends at the token that opens it
        if self._raw_messages is not None:
            self._raw_messages.append(raw(item.opening, item.reading, item.text.written))

    def _message_tokens(self) -> TokenIds:
        """Return the message's tokens after ``<|start|>assistant``; empty if it begins in another way."""
        message = self._tokens[self._began_at : self._position]
        if self._began_at == 0:
            return tuple(message)
        return tuple(message[1:]) if self._token_texts.get(message[0]) == "assistant" else ()

    # In a header, or between messages

    def _read_header(self, token: int) -> Iterable[ParsedFrame]:
        if token == START:  # a message that is followed by another one is not the answer
            yield from self._end_bare("analysis")
            self._header = Header(announced=True)
            self._began_at = self._position
            return
        if token in _CLOSING:
            self._check_end(token)
            yield from self._end_bare("final")
            return
        header = self._header = Header(repairs={"missing start": None}) if self._header is None else self._header
        if token < TEXT_TOKENS:
            header.add(self._encoding.token_bytes[token])
        elif token == MESSAGE:
            yield from self._open(read_header(header, self._recipients))
        elif token in (CHANNEL, CONSTRAIN):
            header.mark("channel" if token == CHANNEL else "constrain")
        else:
            header.repairs.setdefault("stray marker")
        if self._header is header and header.length >= _LONG_HEADER and header.length % _LOOK_EVERY == 0:
            yield from self._end_long(header)

    def _end_long(self, header: Header) -> Iterable[ParsedFrame]:
        if header.is_whole and (header.holds_text or header.length >= _LONGEST_HEADER):
            yield from self._open_bare(header, "final", cut=False)

    def _end_bare(self, channel: str) -> Iterable[ParsedFrame]:
        """End a message whose content never began; ``channel`` is its channel if its header names none."""
        if self._header is not None:
            yield from self._open_bare(self._header, channel, cut=False)
            yield from self._close(complete=True)

    def _open_bare(self, header: Header, channel: str, *, cut: bool) -> Iterable[ParsedFrame]:
        reading = read_bare(header, cut=cut)
        reading.channel = reading.channel or channel
        self._header = None
        if reading.behind:
            yield from self._open(reading)

    def _open(self, reading: Reading) -> Iterable[ParsedFrame]:
        if reading.ahead:
            thought = Reading(channel="analysis", behind=reading.ahead, repairs={"missing message": None})
            yield from self._begin(thought)
            yield from self._close(complete=True)
        yield from self._begin(reading)

    def _begin(self, reading: Reading) -> Iterable[ParsedFrame]:
        opening = reading.opening(self._recipients)
        text = TokenText(
            self._encoding,
            self._stops,
            reports=self._has_logprobs and isinstance(opening, MessageOpened),
            keeps=self._raw_messages is not None,
        )
        text.write(reading.behind)
        self._header = None
        self._item = _OpenItem(opening, reading, text, self._position)
        yield opening
        yield from text.delta()
