"""Long texts, cut into pieces that are encoded one after another."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.models import text_pieces
from penstock.stages.models.text_pieces import pieces

SIZE = 20
MARKS = re.compile(r"<\|end\|>")


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """Hypothesis needs no long texts then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_pieces, "PIECE_CHARACTERS", SIZE)
        yield


@given(st.lists(st.sampled_from(["a", " ", "word", "<|end|>", "é"]), max_size=100).map("".join))
def test_pieces_are_the_text_and_cut_no_mark(text: str) -> None:
    cut = [*pieces(text, MARKS)]
    assert "".join(cut) == text
    assert max(map(len, cut)) <= SIZE
    assert sum(len(MARKS.findall(piece)) for piece in cut) == len(MARKS.findall(text))


def test_text_is_cut_before_a_blank() -> None:
    assert [*pieces("one two three four five six")] == ["one two three four", " five six"]
    assert [*pieces("x" * 30)] == ["x" * 20, "x" * 10]
