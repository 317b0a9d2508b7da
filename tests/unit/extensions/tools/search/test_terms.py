"""Terms: what counts as a word, in scripts with spaces and without."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.tools.search.terms import terms, words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The Cats' stories, and buses", ["the", "cat", "story", "and", "buse"]),
        ("Glass is us", ["glass", "is", "us"]),
        ("Café naïve ÅNGSTRÖM", ["cafe", "naive", "angstrom"]),
        ("Straße", ["strasse"]),
        ("iPhone手机", ["iphone", "手机", "手", "机"]),
        ("ガイド", ["ガイ", "イド", "ガ", "イ", "ド"]),
        ("한국어 문서", ["한국어", "문서"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("สวัสดี"[:2], ["สว", "ส", "ว"]),
        ("كِتَاب", ["كتاب"]),
        ("v2.5_beta", ["v2", "5", "beta"]),
        ("ＡＢＣ １２", ["abc", "12"]),
        ("\0\ud800 '\"*", []),
    ],
)
def test_words_of_a_text(text: str, found: list[str]) -> None:
    assert list(words(text)) == found


@given(st.text(max_size=80))
def test_a_query_has_words_of_the_same_text(text: str) -> None:
    assert set(words(text, is_query=True)) <= set(words(text))


@given(st.text(max_size=80), st.integers(1, 10**9))
def test_terms_are_words_that_no_database_takes_apart(text: str, number: int) -> None:
    for term in filter(None, terms(text, number).split(" ")):
        assert term.startswith(str(number))
        assert '"' not in term
        assert not term.isspace()
        assert "\0" not in term


def test_a_frequent_word_has_terms_of_more_levels() -> None:
    text = "fox " * 7 + "hen " + "word " * 392
    found = terms(text, 12).split(" ")
    assert [term for term in found if term.endswith(("fox", "hen"))] == [
        "12afox", "12bfox", "12cfox", "12dfox", "12ahen",
    ]  # fmt: skip
