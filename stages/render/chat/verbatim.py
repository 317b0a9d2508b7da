"""Encode a rendered text, reusing the tokens that the engine generated in earlier turns.

A text can be encoded as different tokens, and only the generated ones match the engine's prefix cache.  They are used
if the rendered text contains the text of their whole turn, or of its beginning if no more tokens are known.  A template
may leave out the reasoning of an earlier turn; all of that turn is then encoded anew.  White space is ignored, because
templates trim texts and format JSON in their own way.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from penstock.pipeline.frames import TokenIds
from penstock.stages.models.chat.vocabulary import Vocabulary
from penstock.stages.models.text_pieces import pieces

_WORD = re.compile(r"\S+")


def spelled(
    text: str, turns: Sequence[TokenIds], cut: re.Pattern[str], vocabulary: Vocabulary
) -> Iterator[Sequence[int]]:
    """Yield the tokens of ``text``, piece by piece.

    ``turns`` are the tokens that the engine generated, for whole turns or their beginnings.  The text is cut at matches
    of ``cut``, and the pieces are encoded separately.
    """
    at = 0
    for start, end, written in _all_found(text, turns, vocabulary):
        yield from _encoded(text[at:start], cut, vocabulary, is_first=at == 0)
        yield written
        at = end
    yield from _encoded(text[at:], cut, vocabulary, is_first=at == 0)


def _encoded(text: str, cut: re.Pattern[str], vocabulary: Vocabulary, *, is_first: bool) -> Iterator[Sequence[int]]:
    for part in cut.split(text):
        for piece in pieces(part, vocabulary.marks_pattern):
            if piece:
                yield vocabulary.encode(piece) if is_first else vocabulary.encode_further(piece)
            is_first = False


def _all_found(text: str, turns: Sequence[TokenIds], vocabulary: Vocabulary) -> Iterator[tuple[int, int, TokenIds]]:
    if not turns:
        return
    words = _Words(text)
    at = 0
    for written in turns:
        if found := _found(words, written, at, vocabulary):
            yield found
            at = found[1]


def _found(words: _Words, written: TokenIds, at: int, vocabulary: Vocabulary) -> tuple[int, int, TokenIds] | None:
    """Return start, end and tokens of a turn after ``at``, or None if it is not in the text.

    The template may end the turn with another mark than the model did; the model's last token is then left out.
    """
    if span := words.find(vocabulary.decode(written), at):
        return *span, written
    if (span := words.find(vocabulary.decode(written[:-1]), at)) and vocabulary.marks_pattern.match(
        words.text, span[1]
    ):
        return *span, written[:-1]
    return None


class _Words:
    def __init__(self, text: str) -> None:
        self.text = text
        words = [*_WORD.finditer(text)]
        self._starts = [word.start() for word in words]
        self._offsets = [0, *accumulate(word.end() - word.start() for word in words)]
        self._packed = "".join(word[0] for word in words)

    def find(self, text: str, at: int) -> tuple[int, int] | None:
        """Return start and end of ``text`` after ``at``: an exact match if there is one, else ignoring white space."""
        if not (packed := "".join(text.split())):
            return None
        if (start := self.text.find(text, at)) >= 0:
            return start, start + len(text)
        if (start := self._packed.find(packed, self._packed_at(at))) < 0:
            return None
        end = self._unpacked(start + len(packed) - 1) + 1
        return self._unpacked(start), self._next_word(end) if text[-1].isspace() else end

    def _next_word(self, at: int) -> int:
        """Return the position of the first character at or after ``at`` that is no white space."""
        word = _WORD.search(self.text, at)
        return word.start() if word else len(self.text)

    def _packed_at(self, at: int) -> int:
        word = bisect_right(self._starts, at) - 1
        if word < 0:
            return 0
        return min(self._offsets[word] + at - self._starts[word], self._offsets[word + 1])

    def _unpacked(self, packed: int) -> int:
        word = bisect_right(self._offsets, packed) - 1
        return self._starts[word] + packed - self._offsets[word]
