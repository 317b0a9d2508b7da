"""Fences of Markdown in text that arrives in pieces: what stands in code is quoted."""

from __future__ import annotations

import re
from typing import ClassVar

_FENCE = re.compile("`{3,}")


class Fences:
    """Tells if a text stands in a fence, or right after a backtick."""

    triggers: ClassVar[frozenset[str]] = frozenset("`")

    def __init__(self) -> None:
        self._is_open = False
        self._run = ""
        """The backticks at the end of the text."""

    @property
    def is_settled(self) -> bool:
        """True if text without backticks changes nothing."""
        return not self._run

    @property
    def is_quoting(self) -> bool:
        """True if what follows the text so far stands in code."""
        return bool(self._run) or self._is_open

    def note(self, text: str) -> None:
        """Take more text."""
        text = self._run + text
        ended = text.rstrip("`")
        self._run = text[len(ended) :]
        self._is_open ^= len(_FENCE.findall(ended)) % 2 == 1
