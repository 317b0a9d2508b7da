"""Beginnings of sequences of tokens, found by their hashes in a time that grows with their length alone.

A hash is the sum of numbers that stand for a token and its place, so one pass of numpy has those of all beginnings.
Equal hashes are no proof: who finds one compares the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_GROWTH = np.uint64(0xD1B54A32D192ED03)
"""The factor between the weights of neighbouring places; odd, so that no place is without weight."""

_MIXING = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)

_BITS = 16
"""The size of the first filter, as a power of two."""

_SPARSE = 64
"""Places in a filter for each sequence: it takes one token of so many for an end that is none."""


def hashes_of(*parts: array[int]) -> NDArray[np.int64]:
    """Return the hashes of all beginnings of the tokens in ``parts``, the shortest first."""
    tokens = np.concatenate([np.frombuffer(part, np.uint32) for part in parts]).astype(np.uint64)
    tokens = (tokens + np.uint64(1)) * _MIXING
    tokens ^= tokens >> _HALF
    return np.cumsum(tokens * _weights((len(tokens) - 1).bit_length())[: len(tokens)]).view(np.int64)


@lru_cache(maxsize=1)
def _weights(bits: int) -> NDArray[np.uint64]:
    """Return the weights of the first places."""
    return np.cumprod(np.full(1 << bits, _GROWTH), dtype=np.uint64)


class Ends:
    """The ends of sequences that were added, which it finds in others by a filter.

    A few of those that it finds were never added: its caller knows which.
    """

    def __init__(self) -> None:
        self._hashes = array("q")
        self._bits = _BITS
        self._places = np.zeros(1 << _BITS, np.bool_)

    def add(self, end: int) -> None:
        """Add the hash of a whole sequence."""
        self._hashes.append(end)
        if len(self._hashes) * _SPARSE > len(self._places):
            self._bits += 1
            self._places = np.zeros(1 << self._bits, np.bool_)
            self._places[self._place(np.frombuffer(self._hashes, np.int64))] = True
        else:
            self._places[self._place(np.array([end]))] = True

    def within(self, hashes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Yield the length and the hash of each beginning that may be a sequence, the longest first."""
        for at in np.flatnonzero(self._places[self._place(hashes)])[::-1].tolist():
            yield at + 1, int(hashes[at])

    def _place(self, hashes: NDArray[np.int64]) -> NDArray[np.uint64]:
        return (hashes.view(np.uint64) * _MIXING) >> np.uint64(64 - self._bits)
