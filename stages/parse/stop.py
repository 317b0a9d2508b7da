"""Stop texts: the text of an item ends before the first one.

The engine ends generation at a stop text by itself, but by then its tokens have been streamed.  Text that may be the
beginning of a stop text is therefore held back, so that the client never sees part of one.
"""

from __future__ import annotations

import re


class StopTexts:
    """Cuts one text at one or more stop texts.  The result does not depend on how the text is split into pieces."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._first_letter = re.compile(f"[{re.escape(''.join(stop[0] for stop in stops))}]")
        self._held_back = ""
        self.met = False
        """True if a stop text was found.  It is dropped, with all text after it."""

    def feed(self, text: str) -> str:
        """Return the text that may pass: all text before a stop text, or before a possible beginning of one.

        If several stop texts occur, the first to end counts; of several with the same end, the longest.
        """
        if self.met:
            return ""
        # The fast path: no stop text can begin here.
        if not self._held_back and not self._first_letter.search(text):
            return text
        text = self._held_back + text
        if occurrence := min(self._ends(text), default=None):
            self.met, self._held_back = True, ""
            return text[: occurrence[1]]
        passes = len(text) - self._beginning(text)
        self._held_back = text[passes:]
        return text[:passes]

    def flush(self) -> str:
        """Return the text that is still held back: it did not become a stop text."""
        held_back, self._held_back = self._held_back, ""
        return held_back

    def _ends(self, text: str) -> list[tuple[int, int]]:
        """Return end and start of each stop text's first occurrence in ``text``."""
        starts = ((stop, text.find(stop)) for stop in self._stops)
        return [(start + len(stop), start) for stop, start in starts if start >= 0]

    def _beginning(self, text: str) -> int:
        """Return the length of the longest suffix of ``text`` that is a proper prefix of a stop text."""
        return max(_overlap(text, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0
