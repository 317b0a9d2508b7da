"""Terms: the words of a text as the index of both databases has them.

A term is the number of the vector store, a letter for how often the word stands in the chunk, and the word.  The
databases only find whole terms: no text of a client is ever read as a query.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from unicodedata import normalize

LEVELS = (0.0, 1.5, 2.5, 4.5)
"""The frequencies from which on a word has a further term in a chunk, with the next letter of the alphabet."""

TYPICAL = 400
"""Words of a chunk of the usual size.  In a longer chunk, a word has to stand more often to count as much."""

LENGTH_WEIGHT = 0.75
"""BM25's ``b``."""

LONGEST = 64
"""Characters of a word; the rest of a longer one is left out."""

_SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
)
"""Thai, Lao, Burmese, Khmer, Kana and Han, whose words have no spaces between them."""

_MARKED = "\u0900-\u0963\u0966-\u0dff"
"""The scripts of India, whose vowel signs are no letters to Python."""

_WORD = re.compile(rf"(?P<run>[{_SPACELESS}]+)|(?:[{_MARKED}]|(?![{_SPACELESS}])[^\W_])+")

_MARKS = re.compile("[\u0300-\u036f\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u064b-\u065f\u0670]+")
"""The accents, and the vowel points of Hebrew and Arabic, which most people leave out of a query."""


def words(text: str, *, is_query: bool = False) -> Iterator[str]:
    """Yield the words of a text, in lower case, without accents and the plural ``s`` of English.

    In a script without spaces, each pair of neighbours is a word.  Single characters are words of a text as well; in a
    query only if they stand alone.
    """
    for found in _WORD.finditer(_folded(text)):
        if (run := found["run"]) is None:
            yield _singular(found[0][:LONGEST])
            continue
        yield from map("".join, pairwise(run))
        if not is_query or len(run) == 1:
            yield from run


def terms(text: str, number: int) -> str:
    """Return the terms of a chunk of the vector store with this number, with spaces between them."""
    counts = Counter(words(text))
    longer = 1 - LENGTH_WEIGHT + LENGTH_WEIGHT * counts.total() / TYPICAL
    return " ".join(
        term(number, level, word)
        for word, count in counts.items()
        for level, least in enumerate(LEVELS)
        if count >= least * longer
    )


def term(number: int, level: int, word: str) -> str:
    """Return the term of a word that stands in a chunk at this level of frequency, or more often."""
    return f"{number}{'abcd'[level]}{word}"


def _folded(text: str) -> str:
    return normalize("NFC", _MARKS.sub("", normalize("NFKD", text.casefold())))


def _singular(word: str) -> str:
    """Return an English word without its plural ``s``, by the three rules of Harman's stemmer."""
    if len(word) < 4 or word[-1] != "s" or word[-2] in "us":
        return word
    if word.endswith("ies"):
        return word if word[-4] in "ea" else f"{word[:-3]}y"
    if word.endswith("es") and word[-3] in "aeo":
        return word
    return word[:-1]
