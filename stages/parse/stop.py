"""Stop texts: where one comes, the text ends.

The engine ends generation by itself at a stop text, which has then been generated, token by token.  What may yet become
one is held back, so that nobody reads its beginning.
"""

from __future__ import annotations

import re


class StopTexts:
    """The machine: one per text, of one stop text or more.  How the text is cut into pieces makes no difference."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._first_letter = re.compile(f"[{re.escape(''.join(stop[0] for stop in stops))}]")
        self._held_back = ""
        self.met = False
        """Whether a stop text came: it and all behind it is dropped."""

    def feed(self, text: str) -> str:
        """What of the text so far may pass: all ahead of a stop text, or of what may be the beginning of one.

        Where several come, the one that ends first counts, and of those that end together the longest.
        """
        if self.met:
            return ""
        if not self._held_back and not self._first_letter.search(text):
            return text
        text = self._held_back + text
        if found := min(self._ends(text), default=None):
            self.met, self._held_back = True, ""
            return text[: found[1]]
        passes = len(text) - self._beginning(text)
        self._held_back = text[passes:]
        return text[:passes]

    def flush(self) -> str:
        """What was held back, and has not become a stop text."""
        held_back, self._held_back = self._held_back, ""
        return held_back

    def _ends(self, text: str) -> list[tuple[int, int]]:
        """End and start of each stop text that ``text`` holds."""
        starts = ((stop, text.find(stop)) for stop in self._stops)
        return [(start + len(stop), start) for stop, start in starts if start >= 0]

    def _beginning(self, text: str) -> int:
        """The length of the longest end of ``text`` that a stop text begins with."""
        return max(_overlap(text, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that ``stop`` begins with, and goes on after."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0
