"""Chunking: cut a text into overlapping chunks of at most so many tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.stages.models.harmony.vocabulary import HarmonyEncoding

PIECE = 1 << 15
"""Characters that are encoded at once, so that other threads can compute between two pieces."""


class Cut(NamedTuple):
    """A chunk: its text, and the place in it from which on it repeats nothing of the chunk before it."""

    text: str
    fresh: int


def chunks(text: str, tokens: int, overlap: int, encoding: HarmonyEncoding) -> Iterator[Cut]:
    """Yield the chunks of a text; each but the first begins with the last ``overlap`` tokens of the one before it.

    Tokens are those of gpt-oss.  No character is cut: one whose bytes are in two tokens goes with the earlier one.
    """
    ends = [0, *token_ends(text, encoding)]
    start = fresh = 0
    while ends[fresh] < len(text):
        end = min(start + tokens, len(ends) - 1)
        yield Cut(text[ends[start] : ends[end]], ends[fresh] - ends[start])
        start, fresh = end - overlap, end


def token_ends(text: str, encoding: HarmonyEncoding) -> Sequence[int]:
    """Return the number of characters that have begun before the end of each token."""
    ends = list[int]()
    begun = 0
    for at in range(0, len(text), PIECE):
        for token in encoding.encode(text[at : at + PIECE]):
            spelled = encoding.token_bytes[token]
            begun += len(spelled) if spelled.isascii() else sum(byte & 0xC0 != 0x80 for byte in spelled)
            ends.append(begun)
    return ends
