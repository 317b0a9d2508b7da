"""Vocabularies of both kinds: byte-level ones, and sentencepiece ones with byte fallback."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from penstock.stages.models.chat.vocabulary import Vocabulary
from penstock.stages.parse.text import TokenDecoder
from tests.support.chat_families import family_model, fast_tokenizer
from tests.support.examples import examples

pytestmark = pytest.mark.vllm

KINDS = ("bytes", "text", "text with a blank ahead")
TEXTS = st.text(alphabet=st.sampled_from("abc \n<s>é日🧑Ġ0xE\u0301"), max_size=12)


@cache
def vocabulary(kind: str) -> Vocabulary:
    if kind == "bytes":
        return family_model("qwen3").vocabulary
    return Vocabulary(falling_back(begins_with_blank=kind != "text"))


def falling_back(*, begins_with_blank: bool) -> Any:
    """A vocabulary like sentencepiece's: blanks are letters, and text without a piece falls back to bytes."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abc<>s0xE",
        "▁a",
        "bc",
        "▁abc",
    ]
    merges = [("▁", "a"), ("b", "c"), ("▁a", "bc")]
    model = BPE({piece: at for at, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    scheme = "first" if begins_with_blank else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in ("<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return fast_tokenizer(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def text_of(words: Vocabulary, token_ids: list[int]) -> str:
    """The joined bytes of single tokens, as text."""
    decoder = TokenDecoder(words)
    return "".join(map(decoder.decode, token_ids)) + decoder.flush()


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@examples(60)
def test_tokens_spell_the_encoded_text(kind: str, text: str) -> None:
    words = vocabulary(kind)
    spelled = b"".join(words.token_bytes[token] for token in words.encode(text)).decode()
    assert text_of(words, words.encode(text)) == spelled
    assert spelled in ((text, f" {text}") if kind == KINDS[2] else (text,))


@pytest.mark.parametrize("kind", KINDS)
@given(first=TEXTS, second=TEXTS)
@examples(60)
def test_further_text_gets_no_leading_blank(kind: str, first: str, second: str) -> None:
    words = vocabulary(kind)
    whole = [*words.encode_further(first), *words.encode_further(second)]
    assert text_of(words, whole) == first + second


def test_leading_blank_of_further_text_is_kept() -> None:
    words = vocabulary(KINDS[2])
    assert text_of(words, words.encode("abc")) == " abc"
    assert text_of(words, words.encode_further("abc")) == "abc"
    assert text_of(words, words.encode_further(" abc")) == " abc"
    assert text_of(words, words.encode_further("</s>abc")) == "</s>abc"
    assert vocabulary("bytes").encode_further("abc") == vocabulary("bytes").encode("abc")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["🧑", "aé日b", "日"])
def test_character_may_span_tokens(kind: str, text: str) -> None:
    words = vocabulary(kind)
    token_ids = words.encode_further(text)
    assert b"".join(words.token_bytes[token] for token in token_ids) == text.encode()
    parts = [token for token in token_ids if not words.token_bytes[token].isascii()]
    assert any(token not in words.token_texts for token in parts)
    decoder = TokenDecoder(words)
    assert [decoder.decode(token) for token in token_ids].count("") >= 1


@pytest.mark.parametrize(("kind", "mark"), [("bytes", "<think>"), ("text", "<think>"), ("text", "</s>")])
def test_marks_are_single_tokens_and_no_texts(kind: str, mark: str) -> None:
    words = vocabulary(kind)
    token = words.marks[mark]
    assert words.encode(f"a{mark}b").count(token) == 1
    assert words.token_bytes[token] == mark.encode()
    assert words.mark(token) == mark
    assert token not in words.token_texts
    assert mark in words.decode([token])
    assert words.marks_pattern.fullmatch(mark)
    assert list(words.marks) == sorted(words.marks, key=len, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_beyond_the_vocabulary_are_empty(kind: str) -> None:
    """Engines pad their tables, and may sample from the padding."""
    words = vocabulary(kind)
    beyond = max(words.token_bytes) + 5
    assert words.token_bytes[beyond] == b""
    assert words.mark(beyond) == f"<|reserved_{beyond}|>"
    assert text_of(words, [*words.encode_further("a"), beyond]) == "a"
    assert words.mark(words.encode_further("a")[0]) is None


def test_plain_texts_have_neither_triggers_nor_trailing_blanks() -> None:
    words = vocabulary("text")
    plain = words.plain_texts(frozenset("<b"))
    assert set(plain.values()) & {"a", "▁", " ", "bc", "<", "b", " abc", " a", "<think>"} == {"a", " a"}
    assert words.plain_texts(frozenset("<b")) is plain
