"""Ranking: BM25 of the index is close to the formula, and fusion prefers what both rankings like."""

from __future__ import annotations

from collections import Counter
from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.tools.search.ranking import GAINS, best, chosen, fused, scored, unit, weights
from penstock.extensions.tools.search.terms import term, terms, words

WORDS = st.sampled_from(["fox", "hen", "owl", "cat", "dog"])
CHUNKS = st.lists(st.lists(WORDS, min_size=1, max_size=12), min_size=1, max_size=12)


def ranked(texts: list[str], query: str) -> dict[int, float]:
    """Rank texts as the index does, without a database."""
    index = [set(terms(text, 1).split(" ")) for text in texts]
    asked = list(dict.fromkeys(words(query)))
    counts = {word: sum(term(1, 0, word) in held for held in index) for word in asked}
    heavy = weights(counts, len(texts))
    found = [
        (
            heavy[word] * GAINS[level],
            ",".join(str(at) for at, held in enumerate(index) if term(1, level, word) in held),
        )
        for word in chosen(counts)
        for level in range(len(GAINS))
    ]
    numbers, scores = scored(found)
    return dict(best(numbers, scores, len(texts)))


@given(CHUNKS, st.lists(WORDS, min_size=1, max_size=3))
def test_chunks_with_the_words_are_found_and_no_others(chunks: list[list[str]], query: list[str]) -> None:
    found = ranked([" ".join(chunk) for chunk in chunks], " ".join(query))
    assert set(found) == {at for at, chunk in enumerate(chunks) if not set(chunk).isdisjoint(query)}


@given(st.lists(st.integers(0, 20), min_size=2, max_size=8))
def test_more_of_a_word_is_never_worse(frequencies: list[int]) -> None:
    texts = [" ".join(["fox"] * count + ["hen"] * (400 - count)) for count in frequencies]
    found = ranked(texts, "fox")
    order = [frequencies[at] for at in sorted(found, key=found.__getitem__)]
    levels = [sum(count >= least for least in (1, 2, 3, 5)) for count in order]
    assert levels == sorted(levels)


def test_score_is_that_of_bm25_in_steps() -> None:
    texts = ["fox " * count + "hen " * (400 - count) for count in (1, 2, 3, 6)] + ["hen " * 400]
    rarity = log(1 + (5 - 4 + 0.5) / (4 + 0.5))
    highest = 6 / 7.2
    expected = {at: rarity * (count / (count + 1.2)) / highest for at, count in enumerate((1, 2, 3, 6))}
    assert ranked(texts, "fox") == pytest.approx(expected)


def test_rare_words_count_more() -> None:
    texts = ["the fox"] + ["the hen"] * 20
    assert next(iter(ranked(texts, "the fox"))) == 0


def test_the_rarest_words_of_a_long_query_are_searched_for() -> None:
    counts = Counter({f"word{number}": number for number in range(100)})
    assert chosen(counts) == [f"word{number}" for number in range(1, 33)]
    assert chosen({"the": 10**7}) == ["the"]
    assert chosen({"the": 10**7, "fox": 3, "none": 0}) == ["fox"]


@given(st.permutations(range(8)), st.permutations(range(8)), st.floats(0.1, 10), st.floats(0.1, 10))
def test_fusion_is_the_sum_of_reciprocal_ranks(
    first: list[int], second: list[int], weight: float, other: float
) -> None:
    found = dict(fused([(weight, first), (other, second)], 8))
    for number in range(8):
        score = weight / (61 + first.index(number)) + other / (61 + second.index(number))
        assert found[number] == pytest.approx(score * 61 / (weight + other))
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert max(found.values()) <= 1.0 + 1e-9


def test_fusion_without_a_weight_has_no_scores() -> None:
    assert fused([(0.0, [1]), (0.0, [2])], 5) == [(1, 0.0), (2, 0.0)]


def test_unit_vectors_have_length_one_but_for_zero() -> None:
    vectors = unit(np.array([[3.0, 4.0], [0.0, 0.0]], np.float32))
    assert np.linalg.norm(vectors, axis=1).tolist() == pytest.approx([1.0, 0.0])
