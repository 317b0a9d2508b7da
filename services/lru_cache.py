"""LruCache: values in memory, bounded by their size together."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class LruCache(Generic[T]):
    """Values by name, of at most ``most`` bytes or characters together; the least recently used are dropped first.

    Those of one owner take at most ``per_owner`` of them.  Clients without a key are one owner, the empty one, who may
    take all.
    """

    def __init__(self, most: int, per_owner: int | None = None) -> None:
        self._most = most
        self._per_owner = per_owner
        self._kept: OrderedDict[str, tuple[T, int, str]] = OrderedDict()
        self._sizes: Counter[str] = Counter()
        """The sizes of the values together, by owner."""

    def get(self, name: str) -> T | None:
        if name not in self._kept:
            return None
        self._kept.move_to_end(name)
        return self._kept[name][0]

    def put(self, name: str, value: T, size: int, owner: str = "") -> None:
        """Keep a value of this size, unless it is too large."""
        self.drop(name)
        most = self._most if not owner or self._per_owner is None else self._per_owner
        if size > most:
            return
        self._kept[name] = value, size, owner
        self._sizes[owner] += size
        while self._sizes[owner] > most:
            self.drop(next(each for each, (_, _, of) in self._kept.items() if of == owner))
        while self._sizes.total() > self._most:
            self.drop(next(iter(self._kept)))

    def clear(self) -> None:
        self._kept.clear()
        self._sizes.clear()

    def drop(self, name: str) -> None:
        if name in self._kept:
            _, size, owner = self._kept.pop(name)
            self._sizes[owner] -= size
            if not self._sizes[owner]:
                del self._sizes[owner]
