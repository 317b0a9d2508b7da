"""Long texts in pieces that are encoded one after another.

A tokenizer needs a hundred times the memory of a text that it encodes as a whole, and tiktoken's splitter overflows its
stack on a million blanks in a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

PIECE_CHARACTERS = 500_000
"""The most characters of a piece."""

_MARK_CHARACTERS = 100
"""Characters of the longest mark."""
_NO_MARKS = re.compile(r"(?!)")


def pieces(text: str, marks: re.Pattern[str] = _NO_MARKS) -> Iterator[str]:
    """Yield the pieces of a text: cut before a blank if there is one, where most vocabularies begin a token anyway.

    No match of ``marks`` is cut.
    """
    at = 0
    while len(text) - at > PIECE_CHARACTERS:
        end = at + PIECE_CHARACTERS
        blank = text.rfind(" ", at + 1, end)
        end = end if blank < 0 else blank
        around = marks.finditer(text, max(at, end - _MARK_CHARACTERS), end + _MARK_CHARACTERS)
        end = next((mark.start() for mark in around if at < mark.start() < end < mark.end()), end)
        yield text[at:end]
        at = end
    yield text[at:]
