"""Chunking: chunks cover the text, and overlap as asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.tools.search.chunking import chunks, token_ends
from penstock.stages.models.harmony.vocabulary import load_encoding

PIECES = ["word ", "\n", "é", "👩\u200d👩\u200d👧", "水果", "नमस्ते", " ", "𒀀", "longer sentence. "]
TEXTS = st.lists(st.sampled_from(PIECES)).map("".join)


@given(TEXTS | st.text(max_size=200), st.integers(8, 30), st.data())
def test_chunks_cover_the_text_with_the_overlap(text: str, tokens: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, tokens // 2))
    encoding = load_encoding()
    text = text.encode("utf-8", "replace").decode()
    cut = list(chunks(text, tokens, overlap, encoding))
    assert "".join(chunk.text[chunk.fresh :] for chunk in cut) == text
    ends = [0, *token_ends(text, encoding)]
    starts = range(0, len(ends), tokens - overlap)
    for before, chunk, start in zip(cut, cut[1:], starts[1:], strict=False):
        assert before.text.endswith(chunk.text[: chunk.fresh])
        assert chunk.text[: chunk.fresh] == text[ends[start] : ends[start + overlap]]
    for chunk, start in zip(cut, starts, strict=False):
        assert chunk.text == text[ends[start] : ends[min(start + tokens, len(ends) - 1)]]
        assert chunk.text


@given(st.text(alphabet="aé👩水 \n", max_size=100))
def test_every_character_belongs_to_a_token(text: str) -> None:
    ends = token_ends(text, load_encoding())
    assert list(ends) == sorted(ends)
    assert (ends[-1] if text else 0) == len(text)
