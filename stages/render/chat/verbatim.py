"""A rendered text in tokens: what the engine wrote itself in the very tokens that it wrote, all else encoded anew.

A text can be spelled in many tokens, and only those that were generated go on from what the engine has in its cache.
They are used where what they say stands in the rendered text: the template may leave out what an earlier turn thought,
and then nothing of that turn is the model's own.  White space counts for nothing, as templates trim what they are
given, and space out JSON in their own way.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

from penstock.pipeline.frames import TokenIds
from penstock.stages.models.chat.vocabulary import Vocabulary

_WORD = re.compile(r"\S+")


def spelled(text: str, turns: Sequence[TokenIds], cut: re.Pattern[str], vocabulary: Vocabulary) -> Iterator[int]:
    """The tokens of ``text``; ``turns`` are those that the engine wrote, and ``cut`` finds where to encode apart."""
    at = 0
    for start, end, written in _found(text, turns, vocabulary):
        yield from _encoded(text[at:start], cut, vocabulary, is_first=at == 0)
        yield from written
        at = end
    yield from _encoded(text[at:], cut, vocabulary, is_first=at == 0)


def _encoded(text: str, cut: re.Pattern[str], vocabulary: Vocabulary, *, is_first: bool) -> Iterator[int]:
    first, *others = cut.split(text)
    if first:
        yield from vocabulary.encode(first) if is_first else vocabulary.encode_further(first)
    yield from chain.from_iterable(vocabulary.encode_further(piece) for piece in others if piece)


def _found(text: str, turns: Sequence[TokenIds], vocabulary: Vocabulary) -> Iterator[tuple[int, int, TokenIds]]:
    """Where each turn stands in the text, as far as it does, and the tokens that say just that."""
    if not turns:
        return
    words = _Words(text)
    at = 0
    for written in turns:
        if place := _place(words, written, at, vocabulary):
            yield place
            at = place[1]


def _place(words: _Words, written: TokenIds, at: int, vocabulary: Vocabulary) -> tuple[int, int, TokenIds] | None:
    """The place of a turn behind ``at``; the template may end it with another mark than the model did."""
    if found := words.find(vocabulary.decode(written), at):
        return *found, written
    if (found := words.find(vocabulary.decode(written[:-1]), at)) and vocabulary.marks_pattern.match(
        words.text, found[1]
    ):
        return *found, written[:-1]
    return None


class _Words:
    """A text without its white space, to find others in."""

    def __init__(self, text: str) -> None:
        self.text = text
        found = [*_WORD.finditer(text)]
        self._starts = [word.start() for word in found]
        self._offsets = [0, *accumulate(word.end() - word.start() for word in found)]
        self._packed = "".join(word[0] for word in found)

    def find(self, text: str, at: int) -> tuple[int, int] | None:
        """Where ``text`` stands behind ``at``, to the letter if it does; without blanks around it if it does not."""
        if not (packed := "".join(text.split())):
            return None
        if (start := self.text.find(text, at)) >= 0:
            return start, start + len(text)
        if (start := self._packed.find(packed, self._packed_at(at))) < 0:
            return None
        return self._unpacked(start), self._unpacked(start + len(packed) - 1) + 1

    def _packed_at(self, at: int) -> int:
        word = bisect_right(self._starts, at) - 1
        if word < 0:
            return 0
        return min(self._offsets[word] + at - self._starts[word], self._offsets[word + 1])

    def _unpacked(self, packed: int) -> int:
        word = bisect_right(self._offsets, packed) - 1
        return self._starts[word] + packed - self._offsets[word]
