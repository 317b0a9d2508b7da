"""The tokens on the page: those of the prompts, message by message, and the generated ones."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.api.cli.page.flow import Flow
from penstock.api.cli.story import Crossing
from penstock.pipeline.frames import GenerationStarted, TokenChunk
from penstock.pipeline.recordings.token_places import Token

CHANNELS = ("markup", "analysis", "commentary", "final", "call", "unread")
PART_OF_A_CHARACTER = ""
"""The text of a token whose bytes are only part of a character."""


@dataclass
class Texts:
    """The distinct tokens of a page: for each the id, the text, the bytes in hex, and 1 for a special token.

    The text and the bytes are None if the vocabulary is not available.
    """

    told: list[list[Any]] = field(default_factory=list)
    numbers: dict[tuple[int, str | None], int] = field(default_factory=dict)

    def number(self, token: int, written: bytes | None, text: str | None, is_mark: bool) -> int:
        """Return the index of a token that is shown as ``text``, adding it if it is new."""
        if (token, text) not in self.numbers:
            self.numbers[token, text] = len(self.told)
            self.told.append([token, text, None if written is None else written.hex(" "), int(is_mark)])
        return self.numbers[token, text]


@dataclass
class Tokens:
    """All generated tokens, in order, as parallel lists: index of the text, index of the chunk, channel, and turn.

    ``repairs`` and ``logprobs`` are by token, for the tokens that have any.  ``times`` are by chunk, in seconds.
    """

    texts: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    channels: list[str] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    repairs: dict[int, list[str]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        """Return the tokens as JSON for the page, with one digit for the channel of each."""
        values = {name: value for name, value in vars(self).items() if name not in ("channels", "turns")}
        return {**values, "channels": "".join(str(CHANNELS.index(channel)) for channel in self.channels)}


def tokens_of(flow: Flow, texts: Texts) -> Tokens:
    """Return all generated tokens, adding their texts to ``texts``."""
    tokens = Tokens()
    spelling = flow.model.spelling
    ids = [token for crossing in flow.tokens for token in _ids(crossing.frame)]
    placed: Sequence[Token | None] = flow.placed or [None] * len(ids)
    shown = _shown([None if token is None else (token.written, token.is_mark) for token in placed])
    for turn, index, crossing in _chunks(flow.tokens):
        if crossing.at is not None:
            tokens.times[index] = crossing.at
        for position, token in enumerate(crossing.frame.token_ids):
            number = len(tokens.texts)
            place = placed[number]
            written, is_mark = (place.written, place.is_mark) if place else (None, False)
            tokens.texts.append(texts.number(token, written, shown[number], is_mark))
            tokens.chunks.append(index)
            tokens.turns.append(turn)
            tokens.channels.append(place.channel if place else "unread")
            if place and place.repairs:
                tokens.repairs[number] = list(place.repairs)
            if crossing.frame.logprobs and spelling:
                tokens.logprobs[number] = _logprobs(crossing.frame.logprobs[position], spelling)
    return tokens


def _chunks(tokens: Sequence[Crossing]) -> Iterable[tuple[int, int, Crossing]]:
    turn = 0
    for index, crossing in enumerate(tokens):
        turn += isinstance(crossing.frame, GenerationStarted)
        if isinstance(crossing.frame, TokenChunk):
            yield turn, index, crossing


def _ids(frame: Any) -> tuple[int, ...]:
    return frame.token_ids if isinstance(frame, TokenChunk) else ()


def _logprobs(logprob: Any, spelling: Any) -> list[Any]:
    return [logprob.logprob, [[spelling(token).decode(errors="replace"), value] for token, value in logprob.top]]


def _shown(written: Sequence[tuple[bytes, bool] | None]) -> list[str | None]:
    """Return the text of each token.  A character made of several tokens belongs to the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str | None] = []
    for each in written:
        if each is None:
            texts.append(None)
        elif each[1]:
            texts.append(each[0].decode(errors="replace"))
            decoder.reset()
        else:
            texts.append(decoder.decode(each[0]) or PART_OF_A_CHARACTER)
    return texts


def prompts_of(flow: Flow, texts: Texts) -> list[dict[str, Any]]:
    """Return the prompt of each turn, message by message; the first ``known`` messages repeat the previous prompt."""
    entries: list[dict[str, Any]] = []
    before: list[list[int]] = []
    for prompt in flow.prompts:
        messages = _messages(prompt.token_ids, flow, texts)
        known = 0
        while known < min(len(before), len(messages)) and before[known] == messages[known]:
            known += 1
        entries.append(
            {"messages": messages, "known": known, "count": len(prompt.token_ids), "grammar": prompt.grammar}
        )
        before = messages
    return entries


def _messages(token_ids: Sequence[int], flow: Flow, texts: Texts) -> list[list[int]]:
    """Return the tokens of each message of a prompt.

    The first special token that occurs more than once is taken as the beginning of a message.
    """
    spelling, is_mark = flow.model.spelling, flow.model.is_mark
    if spelling is None:
        return [[texts.number(token, None, None, is_mark=False) for token in token_ids]]
    written = [(spelling(token), is_mark(token)) for token in token_ids]
    shown = _shown(written)
    marks = [token for token, (_, mark) in zip(token_ids, written, strict=True) if mark]
    first = next((mark for mark in marks if marks.count(mark) > 1), None)
    messages: list[list[int]] = [[]]
    for token, (token_bytes, mark), text in zip(token_ids, written, shown, strict=True):
        if token == first and messages[-1]:
            messages.append([])
        messages[-1].append(texts.number(token, token_bytes, text, mark))
    return messages
