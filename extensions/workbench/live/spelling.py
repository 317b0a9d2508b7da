"""The texts of tokens, each once for a reader."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from penstock.stages.parse.text import TokenVocabulary


class Spelled(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token: its ``text``, or its bytes in hex if they are part of a character; ``mark`` for one that is no text."""

    text: str | None = None
    hex: str = ""
    mark: bool = False


@dataclass
class Spelling:
    """The tokens of a vocabulary that a reader does not know yet; without a vocabulary they stay numbers."""

    vocabulary: TokenVocabulary | None = None
    known: set[int] = field(default_factory=set)

    def of(self, token_ids: Iterable[int]) -> dict[int, Spelled]:
        """Return the tokens among these that were not returned before."""
        vocabulary = self.vocabulary
        if vocabulary is None:
            return {}
        new = set(token_ids) - self.known
        self.known |= new
        return {token: _spelled(vocabulary, token) for token in new}


def _spelled(vocabulary: TokenVocabulary, token: int) -> Spelled:
    if (mark := vocabulary.mark(token)) is not None:
        return Spelled(mark, mark=True)
    if (text := vocabulary.token_texts.get(token)) is not None:
        return Spelled(text)
    try:
        return Spelled(hex=bytes(vocabulary.token_bytes[token]).hex())
    except LookupError:
        return Spelled()
