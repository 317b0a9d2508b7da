"""LruCache: values in memory, bounded by their size together."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class LruCache(Generic[T]):
    """Values by name, of at most ``most`` bytes or characters together; the least recently used are dropped first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._size = 0

    def get(self, name: str) -> T | None:
        if name not in self._kept:
            return None
        self._kept.move_to_end(name)
        return self._kept[name][0]

    def put(self, name: str, value: T, size: int) -> None:
        """Keep a value of this size, unless it is too large."""
        self.drop(name)
        if size > self._most:
            return
        self._kept[name] = value, size
        self._size += size
        while self._size > self._most:
            self.drop(next(iter(self._kept)))

    def clear(self) -> None:
        self._kept.clear()
        self._size = 0

    def drop(self, name: str) -> None:
        _, size = self._kept.pop(name, (None, 0))
        self._size -= size
