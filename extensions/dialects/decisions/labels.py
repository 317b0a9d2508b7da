"""Labels: the letters by which a model names an option of a question, each of them one token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice, product
from string import ascii_uppercase
from typing import NamedTuple

from penstock.pipeline.frames import TokenIds
from penstock.pipeline.protocol.params.request import MOST_LOGPROB_IDS
from penstock.stages.parse.text import TokenVocabulary

LETTERS = (*ascii_uppercase, *map("".join, product(ascii_uppercase, repeat=2)))
"""The texts of labels: letters, then pairs of them."""


class Label(NamedTuple):
    """A label, and its tokens: a vocabulary may have another one at the beginning of a text."""

    text: str
    tokens: TokenIds


def labels_of(vocabulary: TokenVocabulary, count: int) -> Sequence[Label]:
    """Return the first labels of a vocabulary; fewer if it has no more."""
    found = (_label(vocabulary, text) for text in LETTERS)
    return tuple(islice((label for label in found if label.tokens), count))


@lru_cache(maxsize=2 * len(LETTERS))
def _label(vocabulary: TokenVocabulary, text: str) -> Label:
    first, after = vocabulary.encode(text), vocabulary.encode(f"\n{text}")[-1:]
    tokens = dict.fromkeys(token for ids in (first, after) if len(ids) == 1 for token in ids)
    return Label(text, tuple(token for token in tokens if vocabulary.token_texts.get(token, "").strip() == text))


def tokens_of(labels: Sequence[Label]) -> TokenIds:
    """Return the tokens of all labels."""
    return tuple(token for label in labels for token in label.tokens)


def groups_of(labels: Sequence[Label]) -> Iterator[Sequence[Label]]:
    """Yield labels in groups whose tokens the engine reports at once."""
    begin = count = 0
    for end, label in enumerate(labels):
        if count + len(label.tokens) > MOST_LOGPROB_IDS:
            yield labels[begin:end]
            begin, count = end, 0
        count += len(label.tokens)
    yield labels[begin:]
