"""The tokens on the page: those of the prompts, message by message, and the generated ones."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.extensions.workbench.timeline.rows import turns_and_chunks
from penstock.extensions.workbench.timeline.timeline import Timeline
from penstock.pipeline.recordings.comparison import common_prefix

CHANNELS = ("markup", "analysis", "commentary", "final", "call", "unread")
PART_OF_A_CHARACTER = ""
"""The text of a token whose bytes are only part of a character."""


@dataclass
class Texts:
    """The distinct tokens of a page: id, text and hex bytes (None without the vocabulary), and 1 for a special one."""

    entries: list[list[Any]] = field(default_factory=list)
    numbers: dict[tuple[int, str | None], int] = field(default_factory=dict)

    def add(self, ids: Sequence[int], written: Sequence[tuple[bytes, bool]]) -> list[int]:
        """Return the index of each token; ``written`` has its bytes, and True for a special one, if they are known."""
        if not written:
            return [self._number(token, None, None, is_mark=False) for token in ids]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        numbers = []
        for token, (data, is_mark) in zip(ids, written, strict=True):
            if is_mark:
                decoder.reset()
            # a character made of several tokens belongs to the last of them
            text = data.decode(errors="replace") if is_mark else decoder.decode(data) or PART_OF_A_CHARACTER
            numbers.append(self._number(token, data, text, is_mark=is_mark))
        return numbers

    def _number(self, token: int, data: bytes | None, text: str | None, *, is_mark: bool) -> int:
        if (token, text) not in self.numbers:
            self.numbers[token, text] = len(self.entries)
            self.entries.append([token, text, None if data is None else data.hex(" "), int(is_mark)])
        return self.numbers[token, text]


def tokens_of(timeline: Timeline, texts: Texts) -> dict[str, Any]:
    """Return all generated tokens, as parallel lists: index of the text, index of the chunk, digit of the channel.

    ``repairs`` and ``logprobs`` are by token, for the tokens that have any.  ``times`` are by chunk, in seconds.
    """
    chunks = [chunk for _, chunk in turns_and_chunks(timeline)]
    sent = [(index, timeline.tokens[index]) for index in dict.fromkeys(chunks)]
    ids = [token for _, chunk in sent for token in chunk.frame.token_ids]
    channels: list[str] = [token.channel for token in timeline.attributed] or ["unread"] * len(ids)
    logprobs = [
        logprob
        for _, chunk in sent
        for logprob in chunk.frame.logprobs or (None,) * len(chunk.frame.token_ids)
        if timeline.model.spelling
    ]
    return {
        "texts": texts.add(ids, [(token.written, token.is_mark) for token in timeline.attributed]),
        "chunks": chunks,
        "channels": "".join(str(CHANNELS.index(channel)) for channel in channels),
        "repairs": {number: token.repairs for number, token in enumerate(timeline.attributed) if token.repairs},
        "logprobs": {number: _alternatives(timeline, each) for number, each in enumerate(logprobs) if each},
        "times": {index: chunk.at for index, chunk in sent if chunk.at is not None},
    }


def _alternatives(timeline: Timeline, logprob: Any) -> list[Any]:
    spelling = timeline.model.spelling
    assert spelling is not None
    return [logprob.logprob, [[spelling(token).decode(errors="replace"), value] for token, value in logprob.top]]


def prompts_of(timeline: Timeline, texts: Texts) -> list[dict[str, Any]]:
    """Return the prompt of each turn, message by message; the first ``known`` messages repeat the previous prompt."""
    entries: list[dict[str, Any]] = []
    before: list[list[int]] = []
    for prompt in timeline.prompts:
        messages = _messages(prompt.token_ids, timeline, texts)
        known = common_prefix(before, messages)
        count = len(prompt.token_ids)
        entries.append({"messages": messages, "known": known, "count": count, "grammar": prompt.grammar})
        before = messages
    return entries


def _messages(ids: Sequence[int], timeline: Timeline, texts: Texts) -> list[list[int]]:
    """Split a prompt at the first special token that occurs more than once, which begins a message."""
    spelling, is_mark = timeline.model.spelling, timeline.model.is_mark
    numbers = texts.add(ids, [(spelling(token), is_mark(token)) for token in ids] if spelling else [])
    marks = [token for token in ids if is_mark(token)] if spelling else []
    first = next((mark for mark in marks if marks.count(mark) > 1), None)
    messages: list[list[int]] = [[]]
    for token, number in zip(ids, numbers, strict=True):
        if token == first and messages[-1]:
            messages.append([])
        messages[-1].append(number)
    return messages
