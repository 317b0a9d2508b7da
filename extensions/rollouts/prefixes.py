"""Beginnings of sequences of tokens, found by their hashes in a time that grows with their length alone.

A hash is the sum of numbers that stand for a token and its place, so one pass of numpy has those of all beginnings.
Equal hashes are no proof: who finds one compares the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import cache, cmp_to_key
from itertools import takewhile
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

_GROWTH = np.uint64(0xD1B54A32D192ED03)
"""The factor between the weights of neighbouring places; odd, so that no place is without weight."""

_MIXING = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)

_BITS = 16
"""The size of the first filter, as a power of two."""

_TIES = 64
"""Equally like sequences to each side that are looked at."""

_SPARSE = 64
"""Places in a filter for each sequence: of this number of tokens, it takes one for an end that is none."""


Value = TypeVar("Value")


def common(one: array[int], other: array[int], length: int | None = None) -> int:
    """Return the number of tokens with which both begin, the first one up to a length."""
    most = min(len(one) if length is None else length, len(other))
    differ = np.frombuffer(one, np.uint32, most) != np.frombuffer(other, np.uint32, most)
    return int(differ.argmax()) if differ.any() else most


def hashes_of(*parts: array[int]) -> NDArray[np.int64]:
    """Return the hashes of all beginnings of the tokens in ``parts``, the shortest first."""
    tokens = np.concatenate([np.frombuffer(part, np.uint32) for part in parts]).astype(np.uint64)
    tokens = (tokens + np.uint64(1)) * _MIXING
    tokens ^= tokens >> _HALF
    return np.cumsum(tokens * _weights((len(tokens) - 1).bit_length())[: len(tokens)]).view(np.int64)


@cache
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


class _Sequence(NamedTuple, Generic[Value]):
    tokens: array[int]
    length: int
    value: Value


class Alike(Generic[Value]):
    """Sequences in the order of their tokens: the most like another are the neighbours of its place among them."""

    def __init__(self) -> None:
        self._ordered: list[_Sequence[Value]] = []
        self._new: list[_Sequence[Value]] = []

    def add(self, tokens: array[int], length: int, value: Value) -> None:
        """Add a sequence: the first ``length`` tokens, which never change."""
        self._new.append(_Sequence(tokens, length, value))

    def most_like(self, tokens: array[int]) -> list[Value]:
        """Return the values of the sequences that have the longest common beginning with others, of many only some."""
        if self._new:
            self._ordered = sorted([*self._ordered, *self._new], key=cmp_to_key(_compared))
            self._new.clear()
        at, low, high = _Sequence(tokens, len(tokens), None), 0, len(self._ordered)
        while low < high:
            middle = (low + high) // 2
            if _compared(self._ordered[middle], at) < 0:
                low = middle + 1
            else:
                high = middle
        beside = [range(low - 1, max(low - _TIES, 0) - 1, -1), range(low, min(low + _TIES, len(self._ordered)))]
        shared = [_shared(self._ordered[places[0]], tokens) for places in beside if places]
        most = max(shared, default=0)
        return [
            each.value
            for places in beside
            for each in takewhile(
                lambda each: _shared(each, tokens) == most, (self._ordered[place] for place in places)
            )
        ]


def _shared(sequence: _Sequence[Any], tokens: array[int]) -> int:
    return common(sequence.tokens, tokens, sequence.length)


def _compared(one: _Sequence[Any], other: _Sequence[Any]) -> int:
    at = common(one.tokens, other.tokens, min(one.length, other.length))
    if at == min(one.length, other.length):
        return one.length - other.length
    return one.tokens[at] - other.tokens[at]
