"""Parse Harmony: token ids in, items out.

The machine works on ids, where a marker cannot be confused with text that looks like one, and knows three places: in
a header, in content, and between messages.  It never raises on what a model wrote.  Markup that is wrong is repaired
and named in `ItemClosed.repairs`; every token of text ends up in an item, and the deltas of an item sum to its text.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass

from pipeline.frames import (
    GenerationFinished,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    ParsedFrame,
    ReasoningOpened,
    TokenChunk,
    TokenFrame,
    TurnFinished,
)
from stages.harmony import (
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
from stages.parse.header import Header, Reading, Repairs, Tools, read_bare, read_header

_CLOSING = frozenset({END, RETURN, CALL, END_OF_TEXT})

_LONG_HEADER = 64
"""Tokens.  A header that holds text when it has grown this long is an answer whose markup went missing, and its reader
should see it arrive.  One that still holds nothing but header words may be a call: a function name has up to 64
characters, and each of them, if it is hex, may be a token."""

_LONGEST_HEADER = 256
"""Tokens.  Whatever has grown this long is no header."""

_LOOK_EVERY = 16
"""Tokens between two looks at a long header, for each of them reads all of it."""


@dataclass(frozen=True)
class ParseHarmony:
    """The stage around `HarmonyParser`."""

    encoding: HarmonyEncoding

    async def __call__(self, source: AsyncIterator[TokenFrame]) -> AsyncGenerator[ParsedFrame, None]:
        """Parse one generation."""
        parser = HarmonyParser(self.encoding)
        async for frame in source:
            for parsed in parser.feed(frame):
                yield parsed


class HarmonyParser:
    """The machine: one per generation, whose prompt ended in ``<|start|>assistant``."""

    def __init__(self, encoding: HarmonyEncoding) -> None:
        self._token_bytes = encoding.token_bytes
        self._token_texts = encoding.token_texts
        self._text = TokenDecoder(encoding)
        self._tools: Tools = frozenset()
        self._header: Header | None = Header()
        self._in_content = False
        self._thinking_since: int | None = None
        self._repairs: Repairs = {}
        self._output_tokens = 0
        self._reasoning_tokens = 0

    def feed(self, frame: TokenFrame) -> Iterable[ParsedFrame]:
        """Take one frame, give what became clear by it."""
        match frame:
            case TokenChunk() if self._in_content and not self._text.holds_back:
                return self._read_text(frame.token_ids)
            case TokenChunk():
                return self._read_markup(frame.token_ids)
            case GenerationStarted():
                self._tools = (
                    None if frame.tools.choice == "none" else frozenset(tool.name for tool in frame.tools.tools)
                )
                return (frame,)
            case GenerationFinished():
                return self._finish(frame)

    def _read_text(self, token_ids: tuple[int, ...]) -> Iterable[ParsedFrame]:
        """The short way, which nearly every chunk takes."""
        text = ""
        try:
            for token in token_ids:
                text += self._token_texts[token]
        except KeyError:  # a marker, or part of a character
            return self._read_markup(token_ids)
        self._output_tokens += len(token_ids)
        return (ItemDelta(text),)

    def _read_markup(self, token_ids: tuple[int, ...]) -> Iterable[ParsedFrame]:
        pieces: list[str] = []
        for token in token_ids:
            self._output_tokens += 1
            if self._in_content and token < TEXT_TOKENS:
                pieces.append(self._text.decode(token))
                continue
            yield from _delta(pieces)
            pieces = []
            yield from self._read_marker(token) if self._in_content else self._read_header(token)
        yield from _delta(pieces)

    def _finish(self, finished: GenerationFinished) -> Iterable[ParsedFrame]:
        cut = finished.reason == "length"
        if self._header is not None:
            yield from self._open_bare(self._header, "final", cut=True)
        if self._in_content:
            yield from self._close(complete=not cut, marked=False)
        yield TurnFinished(
            reason=finished.reason,
            cached_tokens=finished.cached_tokens,
            output_tokens=self._output_tokens,
            reasoning_tokens=self._reasoning_tokens,
            duration=finished.duration,
        )

    # In content

    def _read_marker(self, token: int) -> Iterable[ParsedFrame]:
        if token in _CLOSING:
            yield from self._close(complete=True)
        elif token in (START, CHANNEL):
            self._repairs.setdefault("missing end")
            yield from self._close(complete=True)
            yield from self._read_header(token)
        else:
            self._repairs.setdefault("stray marker")

    def _close(self, *, complete: bool, marked: bool = True) -> Iterable[ParsedFrame]:
        if held_back := self._text.flush():
            yield ItemDelta(held_back)
        yield ItemClosed(complete, tuple(self._repairs))
        if self._thinking_since is not None:
            thought = self._output_tokens - self._thinking_since - marked
            self._reasoning_tokens += max(0, thought)  # a bare message ends at the token that opens it
        self._in_content = False
        self._thinking_since = None
        self._repairs = {}

    # In a header, or between messages

    def _read_header(self, token: int) -> Iterable[ParsedFrame]:
        if token == START:  # what another message follows is no answer
            yield from self._end_bare("analysis")
            self._header = Header(announced=True)
            return
        if token in _CLOSING:
            yield from self._end_bare("final")
            return
        header = self._header = Header(repairs={"missing start": None}) if self._header is None else self._header
        if token < TEXT_TOKENS:
            header.add(self._token_bytes[token])
        elif token == MESSAGE:
            yield from self._open(read_header(header, self._tools))
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
        """A message ends though its content never began; ``channel`` is its own where it names none."""
        if self._header is not None:
            yield from self._open_bare(self._header, channel, cut=False)
            if self._in_content:
                yield from self._close(complete=True)

    def _open_bare(self, header: Header, channel: str, *, cut: bool) -> Iterable[ParsedFrame]:
        reading = read_bare(header, cut=cut)
        reading.channel = reading.channel or channel
        self._header = None
        if reading.behind:
            yield from self._open(reading)

    def _open(self, reading: Reading) -> Iterable[ParsedFrame]:
        if reading.ahead:
            yield from self._open(Reading(channel="analysis", behind=reading.ahead, repairs={"missing message": None}))
            yield from self._close(complete=True)
        opening = reading.opening(self._tools)
        self._header = None
        self._in_content = True
        if isinstance(opening, ReasoningOpened):
            self._thinking_since = self._output_tokens
        self._repairs = reading.repairs
        yield opening
        if reading.behind:
            yield ItemDelta(reading.behind)


def _delta(pieces: Iterable[str]) -> Iterable[ParsedFrame]:
    text = "".join(pieces)
    return (ItemDelta(text),) if text else ()


class TokenDecoder:
    """Text of a token stream, in which a character may be spread over several tokens."""

    def __init__(self, encoding: HarmonyEncoding) -> None:
        self._bytes = encoding.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.holds_back = False
        """Whether a character is unfinished."""

    def decode(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        text = self._decoder.decode(self._bytes[token])
        self.holds_back = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """What an unfinished character leaves behind: U+FFFD or nothing."""
        self.holds_back = False
        return self._decoder.decode(b"", final=True)
