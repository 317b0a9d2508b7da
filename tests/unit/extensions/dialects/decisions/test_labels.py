"""Labels of the vocabularies of both kinds of models, and of one that puts a blank before a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from penstock.extensions.dialects.decisions.labels import LETTERS, Label, groups_of, labels_of, tokens_of
from penstock.pipeline.protocol.params.request import MOST_LOGPROB_IDS
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.parse.text import TokenVocabulary
from tests.support.chat_templates import vocabulary


@dataclass(frozen=True)
class Blanks:
    """Three letters, each with a token after a blank, which stands before every text, and another one without."""

    token_bytes: tuple[bytes, ...] = ()

    @property
    def token_texts(self) -> Mapping[int, str]:
        bare = {10 + at: letter for at, letter in enumerate("ABC")}
        return {0: "\n", **bare, **{10 + token: f" {letter}" for token, letter in bare.items()}}

    def mark(self, token: int) -> str | None:
        return None

    def is_special(self, token: int) -> bool:
        return False

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.token_texts[token] for token in token_ids)

    def encode(self, text: str) -> list[int]:
        ids = {text: token for token, text in self.token_texts.items()}
        text = text if text.startswith("\n") else f" {text}"
        first = text[:2] if text[:2] in ids else text[:1]
        return [ids.get(each, 99) for each in (first, *text[len(first) :])]


@pytest.mark.parametrize("words", [load_encoding(), vocabulary()], ids=["harmony", "qwen"])
def test_label_is_one_token_of_its_text(words: TokenVocabulary) -> None:
    labels = labels_of(words, 255)
    assert [label.text for label in labels[:3]] == ["A", "B", "C"]
    for label in labels:
        assert [words.decode([token]).strip() for token in label.tokens] == [label.text] * len(label.tokens)
    tokens = [token for label in labels for token in label.tokens]
    assert len(tokens) == len(set(tokens))


def test_gpt_oss_has_labels_for_all_choices() -> None:
    assert len(labels_of(load_encoding(), 255)) == 255


def test_label_has_the_tokens_of_both_places_in_a_text() -> None:
    assert [(label.text, set(label.tokens)) for label in labels_of(Blanks(), 255)] == [
        ("A", {10, 20}),
        ("B", {11, 21}),
        ("C", {12, 22}),
    ]


@pytest.mark.parametrize("each", [1, 2, 3])
def test_groups_have_all_tokens_and_cut_no_label(each: int) -> None:
    labels = [Label(text, tuple(range(each * at, each * at + each))) for at, text in enumerate(LETTERS[:255])]
    groups = list(groups_of(labels))
    assert [label for group in groups for label in group] == labels
    assert all(0 < len(tokens_of(group)) <= MOST_LOGPROB_IDS for group in groups)
    assert tokens_of(labels) == tuple(range(255 * each))
