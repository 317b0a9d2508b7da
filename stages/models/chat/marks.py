"""Marks in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

_INSIDE = "[^<>]{0,80}"
_SPAN_CHARACTERS = 100
"""Characters of the end of a text in which a mark with ``…`` may have begun."""


def begins_with(text: str, begin: str) -> bool | None:
    """True if ``text`` begins with ``begin``, None if it is too short to tell."""
    return text.startswith(begin) or (None if begin.startswith(text) else False)


@lru_cache(1024)
def _patterns(given: frozenset[str]) -> tuple[re.Pattern[str], re.Pattern[str] | None, tuple[str, ...]]:
    """Return the pattern of some marks, that of open ones at the end of a text, and the beginnings of marks."""
    open_marks = [mark.split("…") for mark in sorted(given) if "…" in mark]
    longest_first = sorted((mark for mark in given if "…" not in mark), key=len, reverse=True)
    spans = [f"{re.escape(begin)}{_INSIDE}{re.escape(end)}" for begin, end in open_marks]
    pattern = re.compile("|".join((*spans, *map(re.escape, longest_first))) or "(?!)")
    begun = [f"{re.escape(begin)}{_INSIDE}" for begin, _ in open_marks]
    longest_first += [begin for begin, _ in open_marks]
    beginnings = {mark[:length] for mark in longest_first for length in range(1, len(mark))}
    at_end = re.compile(f"(?:{'|'.join(begun)})\\Z") if begun else None
    return pattern, at_end, tuple(sorted(beginnings, key=len, reverse=True))


class Marks:
    """Finds the first of some texts, and the beginning of one at the end of what has arrived.

    ``…`` in a mark stands for up to 80 characters that are no angle brackets.
    """

    def __init__(self, marks: Iterable[str]) -> None:
        self._pattern, self._begun, self._beginnings = _patterns(frozenset(filter(None, marks)))

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        """Find the first mark from position ``at`` on; of two that begin there, the longer one."""
        return self._pattern.search(text, at)

    def match(self, text: str, at: int = 0) -> re.Match[str] | None:
        """Match a mark at position ``at``."""
        return self._pattern.match(text, at)

    def may_begin(self, text: str) -> bool:
        """True if the whole of ``text`` is the beginning of a mark, or of a longer one than it is."""
        return text in self._beginnings or not text

    def overlap(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that may become a mark."""
        if self._begun and (begun := self._begun.search(text, max(0, len(text) - _SPAN_CHARACTERS))):
            return len(text) - begun.start()
        if not text.endswith(self._beginnings):
            return 0
        return next(len(beginning) for beginning in self._beginnings if text.endswith(beginning))
