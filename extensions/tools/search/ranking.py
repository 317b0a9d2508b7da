"""Ranking: BM25 over the terms of the index, and the fusion of its ranking with that of embeddings.

The score of BM25 here is the share of the best one that a chunk could have, so that it is between 0 and 1 and scores of
several vector stores can be compared.  The frequency of a word is known in the steps of `LEVELS`, for chunks of a
usual length.  So no chunk is read to rank it, and both databases rank alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.int64]
Scores: TypeAlias = NDArray[np.float64]

SATURATION = 1.2
"""BM25's ``k1``."""

FREQUENCIES = (1.0, 2.0, 3.0, 6.0)
"""The frequencies for which the levels stand."""

MOST_WORDS = 32
"""Words of a query that are searched for; the rarest, if it has more."""

MOST_HITS = 200_000
"""Chunks with a word of the query that are looked at, counted once for each word; the rarest words come first."""

FUSION = 60
"""The constant of reciprocal rank fusion."""

_WORTH = tuple(frequency / (frequency + SATURATION) for frequency in FREQUENCIES)
GAINS = tuple((here - before) / _WORTH[-1] for here, before in zip(_WORTH, (0.0, *_WORTH), strict=False))
"""The share of a word's weight that a chunk gets for each level that the word reaches in it."""


def weights(counts: Mapping[str, int], chunks: int) -> dict[str, float]:
    """Return the weight of each word, which stands in so many of all ``chunks``: BM25's inverse document frequency."""
    return {word: log(1 + (max(chunks, count) - count + 0.5) / (count + 0.5)) for word, count in counts.items()}


def chosen(counts: Mapping[str, int]) -> list[str]:
    """Return the words to search for, rarest first: as many as `MOST_WORDS` and `MOST_HITS` allow, but at least one."""
    taken, hits = list[str](), 0
    for word in sorted((word for word, count in counts.items() if count), key=counts.__getitem__):
        hits += counts[word]
        if taken and (hits > MOST_HITS or len(taken) == MOST_WORDS):
            break
        taken.append(word)
    return taken


def numbers_in(text: str | None) -> Numbers:
    """Return the numbers in a text, which has commas between them."""
    return np.fromstring(text, dtype=np.int64, sep=",") if text else np.empty(0, np.int64)


def scored(found: Sequence[tuple[float, str | None]]) -> tuple[Numbers, Scores]:
    """Return the chunks, each once, with the sum of what they get; ``found`` has a gain and its chunks."""
    lists = [numbers_in(text) for _, text in found]
    if not lists:
        return np.empty(0, np.int64), np.empty(0)
    numbers, places = np.unique(np.concatenate(lists), return_inverse=True)
    gains = np.repeat([gain for gain, _ in found], [len(some) for some in lists])
    return numbers, np.bincount(places, weights=gains, minlength=len(numbers)).astype(np.float64)


def best(numbers: Numbers, scores: Scores, most: int) -> list[tuple[int, float]]:
    """Return the chunks with the highest scores, best first; of equal ones, the older first."""
    if len(scores) > most:
        least = np.partition(scores, -most)[-most]
        kept = scores >= least
        numbers, scores = numbers[kept], scores[kept]
    order = np.lexsort((numbers, -scores))[:most]
    return [(int(numbers[at]), float(scores[at])) for at in order]


def fused(rankings: Sequence[tuple[float, Sequence[int]]], most: int) -> list[tuple[int, float]]:
    """Return the chunks by reciprocal rank fusion of rankings, each with a weight; the best score possible is 1."""
    scores = dict[int, float]()
    for weight, ranking in rankings:
        for rank, number in enumerate(ranking, 1):
            scores[number] = scores.get(number, 0.0) + weight / (FUSION + rank)
    highest = sum(weight for weight, _ in rankings) / (FUSION + 1)
    return [
        (number, score / highest if highest else 0.0)
        for number, score in sorted(scores.items(), key=lambda found: (-found[1], found[0]))[:most]
    ]


def nearest(query: NDArray[np.float32], vectors: NDArray[np.float32]) -> Scores:
    """Return the cosine similarity of a query with each vector; both have the length 1."""
    return (vectors @ query).astype(np.float64)


def unit(vectors: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Return vectors with the length 1."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.where(lengths == 0, 1, lengths), np.float32)
