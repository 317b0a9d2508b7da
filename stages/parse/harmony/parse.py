"""Parse Harmony: token ids in, items out.

The parser works on token ids, so that it cannot confuse a marker with text that looks like one.  It never raises an
error on output that no grammar constrained.  Wrong markup is repaired, and the repair is named in `ItemClosed.repairs`.
Every text token ends up in an item, and the deltas of an item sum to its text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeAlias

from penstock.pipeline import frames
from penstock.pipeline.hot_path import on_the_way
from penstock.stages.models.harmony import vocabulary
from penstock.stages.parse.harmony.header import HarmonyHeader, HeaderFields, raw, read_bare, read_header
from penstock.stages.parse.harmony.recipients import Recipients
from penstock.stages.parse.only_text import OnlyText
from penstock.stages.parse.parser import Opening, ParseStage, TurnParser, grammar_broken
from penstock.stages.parse.plain import PlainParser
from penstock.stages.parse.text import TokenText

_CLOSING = frozenset({vocabulary.END, vocabulary.RETURN, vocabulary.CALL, vocabulary.END_OF_TEXT})

_BREAKING_OFF = frozenset({vocabulary.RETURN, vocabulary.END_OF_TEXT})
"""If a turn's grammar fails, the engine ends the turn with its end-of-sequence token, which is one of these."""


@on_the_way
@dataclass(frozen=True)
class ParseHarmony(ParseStage):
    """The pipeline stage around `HarmonyParser`."""

    encoding: vocabulary.HarmonyEncoding

    @property
    def vocabulary(self) -> vocabulary.HarmonyEncoding:
        """The encoding."""
        return self.encoding

    async def _begin(self, started: frames.GenerationStarted) -> TurnParser:
        if (raw := started.facts.raw) is not None:
            return PlainParser(self.encoding, started, raw)
        return HarmonyParser(self.encoding, started)


@dataclass(slots=True)
class _OpenItem:
    opening: Opening
    reading: HeaderFields
    text: TokenText
    opened_at: int
    """The position after the token that opened it."""
    custom: OnlyText | None
    """Unwraps the input of a custom tool that takes any text."""

    @property
    def is_plain(self) -> bool:
        """True if the next token's text can be emitted as it is."""
        return self.text.is_plain and (self.custom is None or self.custom.is_plain)

    def passed(self, deltas: Iterator[frames.ItemDelta]) -> Iterator[frames.ItemDelta]:
        """Yield those of its deltas that may be passed on."""
        if self.custom is None:
            yield from deltas
            return
        for delta in deltas:
            if text := self.custom.feed(delta.text):
                yield frames.ItemDelta(text)


_State: TypeAlias = HarmonyHeader | _OpenItem | None
"""In a header, in the content of a message, or between two messages."""


class HarmonyParser(TurnParser):
    """Parses one generation, whose prompt ended in ``<|start|>assistant``, or in the text of an unfinished message."""

    def __init__(self, encoding: vocabulary.HarmonyEncoding, started: frames.GenerationStarted) -> None:
        super().__init__(encoding, started)
        self._encoding = encoding
        self._recipients = Recipients(started.facts.tools)
        self._held_to_grammar = started.held_to_grammar
        self._raw_messages: list[dict[str, Any]] | None = None if started.raw_messages is None else []
        self._continued = started.channel
        """The channel of the prompt's unfinished message, which the first tokens continue."""
        self._state: _State = HarmonyHeader()
        self._began_at = 0  # the position of the latest message, after its <|start|>
        self._has_logprobs = False

    def _read(self, chunk: frames.TokenChunk) -> Iterator[frames.ParsedFrame]:
        self._has_logprobs = self._wants_logprobs and bool(chunk.logprobs)
        if self._continued and chunk.token_ids and not self._tokens:
            yield from self._open(HeaderFields(channel=self._continued))
        for token, logprob in zip_longest(chunk.token_ids, chunk.logprobs):
            self._tokens.append(token)
            if token < vocabulary.TEXT_TOKENS and isinstance(self._state, _OpenItem):
                self._state.text.add(token, logprob)
            else:
                yield from self._read_markup(token)
            if isinstance(self._state, _OpenItem) and self._state.text.is_cut:
                yield from self._end(is_marked=False)
            if self._is_stopped:
                break
        self._plain_texts = None
        if isinstance(self._state, _OpenItem):
            yield from self._state.passed(self._state.text.delta())
            self._plain_texts = self._encoding.token_texts if self._state.is_plain else None

    @property
    def _open_reasoning_tokens(self) -> int:
        item = self._state
        return self._reasoning_of(item) if isinstance(item, _OpenItem) else 0

    def _reasoning_of(self, item: _OpenItem) -> int:
        """Return the tokens of an item that are reasoning."""
        return len(self._tokens) - item.opened_at if isinstance(item.opening, frames.ReasoningOpened) else 0

    def _finish(self, finished: frames.GenerationFinished) -> Iterator[frames.ParsedFrame]:
        yield from self._end("final", complete=finished.reason not in ("length", "cancelled"), is_marked=False)
        yield self._turn_finished(finished, None if self._raw_messages is None else tuple(self._raw_messages))

    # All transitions between the states

    def _read_markup(self, token: int) -> Iterator[frames.ParsedFrame]:
        """Take a token that is not the text of an open item."""
        state = self._state
        if isinstance(state, _OpenItem):
            yield from state.passed(state.text.delta())
        if token in _CLOSING:
            self._check_end(token)
            yield from self._end("final")
        elif isinstance(state, _OpenItem):
            if token in (vocabulary.START, vocabulary.CHANNEL):
                state.reading.repairs.setdefault("missing end")
                yield from self._end()
                yield from self._read_markup(token)
            else:
                state.reading.repairs.setdefault("stray marker")
        elif token == vocabulary.START:
            yield from self._end("analysis")  # a message that is followed by another one is not the answer
            self._state, self._began_at = HarmonyHeader(announced=True), len(self._tokens)
        else:
            self._state = header = state or HarmonyHeader(repairs={"missing start": None})
            if token == vocabulary.MESSAGE:
                yield from self._open(read_header(header, self._recipients))
                return
            header.add(token, self._encoding.token_bytes)
            if header.is_answer:
                yield from self._open_bare(header, "final", cut=False)

    def _open_bare(self, header: HarmonyHeader, channel: str, *, cut: bool) -> Iterator[frames.ParsedFrame]:
        """Open a message whose header never ended; ``channel`` is its channel if the header names none."""
        reading = read_bare(header, cut=cut)
        reading.channel = reading.channel or channel
        self._state = None
        if reading.text_after:
            yield from self._open(reading)

    def _open(self, reading: HeaderFields) -> Iterator[frames.ParsedFrame]:
        if reading.text_before:
            thought = HeaderFields(
                channel="analysis", text_after=reading.text_before, repairs={"missing message": None}
            )
            yield from self._open(thought)
            yield from self._end()
        opening = reading.opening(self._recipients)
        text = TokenText(
            self._encoding,
            self._stop_strings(opening),
            reports=self._has_logprobs and isinstance(opening, frames.MessageOpened),
            keeps=self._raw_messages is not None,
        )
        text.write(reading.text_after)
        is_json = (reading.content_type or "").endswith("json")
        custom = OnlyText(is_json=is_json) if self._recipients.takes_any_text(opening) else None
        item = self._state = _OpenItem(opening, reading=reading, text=text, opened_at=len(self._tokens), custom=custom)
        yield opening
        yield from item.passed(text.delta())

    def _end(self, channel: str = "", *, complete: bool = True, is_marked: bool = True) -> Iterator[frames.ParsedFrame]:
        """End the open message, if there is one; ``is_marked`` is True if a token ends it.

        ``channel`` is for a message whose header never ended, and names no channel.
        """
        if isinstance(self._state, HarmonyHeader):
            yield from self._open_bare(self._state, channel, cut=not is_marked)
        item, self._state = self._state, None
        if not isinstance(item, _OpenItem):
            return
        yield from item.passed(item.text.close(cut=not is_marked))
        if item.custom is not None:
            rest, is_unwrapped = item.custom.end()
            if is_unwrapped:
                item.reading.repairs.setdefault("wrapped input")
            if rest:
                yield frames.ItemDelta(rest)
        repairs = tuple(item.reading.repairs)
        self._stopped_by = item.text.cut_by
        token_ids = self._message_tokens() if is_marked and not repairs and not self._is_stopped else ()
        yield frames.ItemClosed(complete, repairs, token_ids, self._is_stopped)
        # a bare message ends at the token that opens it
        self._reasoning_tokens += max(0, self._reasoning_of(item) - is_marked)
        if self._raw_messages is not None:
            self._raw_messages.append(raw(item.opening, item.reading, item.text.written))

    def _check_end(self, token: int) -> None:
        """Raise `EngineFailed` if ``token`` ends the turn at a point where its grammar does not allow that."""
        if self._held_to_grammar and token in _BREAKING_OFF:
            item = self._state
            if not isinstance(item, _OpenItem) or item.opening != frames.MessageOpened("final_answer"):
                raise grammar_broken()

    def _message_tokens(self) -> frames.TokenIds:
        """Return the message's tokens after ``<|start|>assistant``; empty if it begins in another way."""
        message = tuple(self._tokens[self._began_at :])
        if self._began_at == 0:
            return () if self._continued else message
        return message[1:] if self._encoding.token_texts.get(message[0]) == "assistant" else ()
