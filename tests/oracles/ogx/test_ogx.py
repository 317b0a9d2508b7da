from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.ogx.__main__ import SUITE
from tests.oracles.ogx.searching_model import turn
from tests.oracles.ogx.word_vectors import DIMENSION, vector

QUESTIONS = st.text('ab "\\\n?', min_size=1)


def prompt(question: str, *after: str) -> str:
    message = f"<|start|>user<|message|>{question}<|end|>"
    return "".join(["<|start|>system<|message|>namespace file_search {}<|end|>", message, *after, "<|start|>assistant"])


def test_each_failing_test_is_explained_once() -> None:
    assert SUITE.verdicts()


@given(QUESTIONS)
def test_model_searches_once_and_quotes_what_it_finds(question: str) -> None:
    assert "to=file_search.search" in turn(prompt(question))
    found = "<|start|>file_search.search to=assistant<|channel|>commentary<|message|>[1] a.txt\nL1: 128 experts<|end|>"
    assert turn(prompt(question, found)) == "<|channel|>final<|message|>128 experts<|return|>"
    assert "to=file_search.search" in turn(prompt(question, found, f"<|start|>user<|message|>{question}<|end|>"))


@given(st.lists(st.from_regex(r"\w{1,5}", fullmatch=True)))
def test_vectors_count_words_in_any_order(words: list[str]) -> None:
    assert vector(" ".join(words)) == vector(" ".join(sorted(words)))
    assert len(vector("")) == DIMENSION
