"""Texts that pass a reader unchanged: those without the beginning of a mark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from penstock.stages.models.chat.marks import Marks


class Triggers(Protocol):
    """The characters that the marks of a reader begin with, or more precisely the `Beginnings` of its marks."""

    def isdisjoint(self, text: str, /) -> bool:
        """True if no mark begins in ``text``."""
        ...

    def __hash__(self) -> int: ...


class Beginnings:
    """The beginnings of some marks whose first characters are too common."""

    def __init__(self, marks: Iterable[str]) -> None:
        self._all = frozenset(marks)
        self._marks = Marks(self._all)

    def isdisjoint(self, text: str, /) -> bool:
        """True if ``text`` has no mark, and ends with the beginning of none."""
        return self._marks.search(text) is None and not self._marks.overlap(text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Beginnings) and self._all == other._all

    def __hash__(self) -> int:
        return hash(self._all)


class _Union:
    def __init__(self, parts: frozenset[Triggers]) -> None:
        self._parts = parts

    def isdisjoint(self, text: str, /) -> bool:
        return all(part.isdisjoint(text) for part in self._parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Union) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)


def united(one: Triggers, other: Triggers) -> Triggers:
    """Return the triggers of two readers of one output."""
    if isinstance(one, frozenset) and isinstance(other, frozenset):
        return one | other
    return _Union(frozenset((one, other)))
