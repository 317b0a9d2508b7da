"""LruCache: decoded rows in memory, bounded by the bytes of their columns."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")

BYTES = 16 * 2**20
"""Limit on the encoded columns of all values in a cache."""


class LruCache(Generic[T]):
    """Values by id; the least recently used are dropped first.

    A value must not change in the database as long as the caller can find its id there.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._size = 0

    def get(self, name: str) -> T | None:
        if name not in self._kept:
            return None
        self._kept.move_to_end(name)
        return self._kept[name][0]

    def put(self, name: str, value: T, size: int) -> None:
        """Keep a value whose columns have ``size`` bytes, unless it is too large."""
        self.drop(name)
        if size > BYTES:
            return
        self._kept[name] = value, size
        self._size += size
        while self._size > BYTES:
            self.drop(next(iter(self._kept)))

    def clear(self) -> None:
        self._kept.clear()
        self._size = 0

    def drop(self, name: str) -> None:
        _, size = self._kept.pop(name, (None, 0))
        self._size -= size
