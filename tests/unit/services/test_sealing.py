"""Sealed content: only an owner's own texts open, unchanged, whatever a client does with them."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.sealing import (
    MOST_CHARACTERS,
    PREFIX,
    SealedItem,
    SealedReasoning,
    SealedSummary,
    Sealer,
    Unverified,
)

THOUGHT = SealedReasoning("The user wants a joke. " * 20, tuple(range(200_000, 200_100)))
OWNER = "owner"


_token_ids = st.lists(st.integers(0, 2**32)).map(tuple)
_items = st.builds(SealedItem, st.text(), _token_ids, st.none() | st.text())


@given(st.text(), _token_ids, st.lists(_items, max_size=3).map(tuple), st.text())
def test_opens_what_it_sealed(
    text: str, token_ids: tuple[int, ...], before: tuple[SealedItem, ...], owner: str
) -> None:
    sealer, thought = Sealer([b"k" * 32]), SealedReasoning(text, token_ids, before)
    assert Sealer([b"k" * 32]).open(sealer.seal(thought, owner), owner, SealedReasoning) == thought


def test_no_two_texts_are_equal() -> None:
    sealer = Sealer()
    assert len({sealer.seal(THOUGHT, OWNER) for _ in range(100)}) == 100


def test_hides_and_compresses_the_content() -> None:
    text = Sealer().seal(SealedSummary("secret " * 1000), OWNER)
    assert text.startswith(PREFIX)
    assert "secret" not in text
    assert len(text) < 200


@given(st.integers(0, 10_000), st.integers(0, 5))
def test_refuses_a_text_with_a_changed_bit(place: int, bit: int) -> None:
    sealer = Sealer()
    text = sealer.seal(THOUGHT, OWNER)
    at = len(PREFIX) + place % (len(text) - len(PREFIX) - 1)  # the last character has bits that mean nothing
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    changed = alphabet[alphabet.index(text[at]) ^ 1 << bit]
    with pytest.raises(Unverified):
        sealer.open(text[:at] + changed + text[at + 1 :], OWNER, SealedReasoning)


@given(st.integers(0, 10_000))
def test_refuses_a_truncated_text(length: int) -> None:
    sealer = Sealer()
    text = sealer.seal(THOUGHT, OWNER)
    with pytest.raises(Unverified):
        sealer.open(text[: max(len(PREFIX), length % len(text))], OWNER, SealedReasoning)


@given(st.text())
def test_refuses_any_other_text_with_its_prefix(rest: str) -> None:
    with pytest.raises(Unverified):
        Sealer().open(PREFIX + rest, OWNER, SealedReasoning)


def test_refuses_another_owner_another_key_and_another_kind() -> None:
    sealer = Sealer()
    text = sealer.seal(THOUGHT, OWNER)
    with pytest.raises(Unverified):
        sealer.open(text, "another", SealedReasoning)
    with pytest.raises(Unverified):
        Sealer().open(text, OWNER, SealedReasoning)
    with pytest.raises(Unverified, match="another kind"):
        sealer.open(text, OWNER, SealedSummary)


def test_refuses_a_text_beyond_its_bound() -> None:
    with pytest.raises(Unverified, match="too long"):
        Sealer().open(PREFIX + "A" * MOST_CHARACTERS, OWNER, SealedReasoning)


@given(st.text().filter(lambda text: not text.startswith(PREFIX)))
def test_leaves_texts_of_others_alone(text: str) -> None:
    assert Sealer().open(text, OWNER, SealedReasoning) is None


def test_rotates_its_keys() -> None:
    old, new = b"old " * 8, b"new " * 8
    before, after = Sealer([old]).seal(THOUGHT, OWNER), Sealer([new, old]).seal(THOUGHT, OWNER)
    assert Sealer([new, old]).open(before, OWNER, SealedReasoning) == THOUGHT
    assert Sealer([new]).open(after, OWNER, SealedReasoning) == THOUGHT
    with pytest.raises(Unverified):
        Sealer([new]).open(before, OWNER, SealedReasoning)


def test_thought_of_an_older_release_opens() -> None:
    """Release 0.3 sealed no writer."""
    older = msgspec.defstruct(
        "SealedReasoning",
        [("text", str), ("token_ids", tuple[int, ...]), ("before", tuple[SealedItem, ...])],
        tag="reasoning",
        array_like=True,
    )
    sealer = Sealer()
    content: Any = older("I see.", (5,), (SealedItem("msg_a", (1,)),))
    opened = sealer.open(sealer.seal(content, "a"), "a", SealedReasoning)
    assert opened == SealedReasoning("I see.", (5,), (SealedItem("msg_a", (1,)),))
