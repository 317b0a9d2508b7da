"""Stop strings: the text ends before the first one, and the beginning of one is never sent."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.models.harmony.vocabulary import HarmonyEncoding
from penstock.stages.parse.text import StopStrings
from tests.support.parsed_output import parse_harmony_text

letters = st.text("ab", max_size=30)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def ended(text: str, stops: tuple[str, ...]) -> str:
    """``text`` before the first complete stop string, found by trying every position."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return text


def pieces(text: str, cuts: list[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise([0, *sorted(at % (len(text) + 1) for at in cuts), len(text)])]


@given(letters, stop_strings, st.lists(st.integers(0, 30)))
def test_text_ends_at_the_first_stop_string(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    machine = StopStrings(stops)
    passed = [machine.feed(piece) for piece in pieces(text, cuts)]
    assert "".join([*passed, machine.flush()]) == ended(text, stops)
    assert machine.found == any(stop in text for stop in stops)


@given(letters, stop_strings)
def test_only_the_beginning_of_a_stop_string_is_held(text: str, stops: tuple[str, ...]) -> None:
    machine, passed = StopStrings(stops), ""
    for end, letter in enumerate(text, start=1):
        passed += machine.feed(letter)
        if machine.found:
            return
        beginnings = (stop[:size] for stop in stops for size in range(1, len(stop)))
        waiting = max((len(start) for start in beginnings if text[:end].endswith(start)), default=0)
        assert passed == text[: end - waiting]


CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ("<|channel|>final<|message|>", "Message"),
        ("<|channel|>analysis<|message|>", "Reasoning"),
        (CALL, "FunctionCall"),
        ("<|message|>", "Message"),
        ("<|channel|>final ", "Message"),
    ],
)
@pytest.mark.parametrize("end", ["", "<|return|>"])
def test_every_item_ends_at_a_stop_string(header: str, kind: str, end: str, encoding: HarmonyEncoding) -> None:
    (item,) = parse_harmony_text(encoding, f"{header}one two STOP three{end}", stop=("STOP",))
    assert (item.kind, item.text, item.complete) == (kind, "one two ", True)


def test_stop_string_does_not_span_two_items(encoding: HarmonyEncoding) -> None:
    text = "<|channel|>analysis<|message|>a ST<|end|><|start|>assistant<|channel|>final<|message|>OP b<|return|>"
    assert [item.text for item in parse_harmony_text(encoding, text, stop=("STOP",))] == ["a ST", "OP b"]


def test_stop_string_may_have_split_characters(encoding: HarmonyEncoding) -> None:
    text = "<|channel|>final<|message|>a 👩‍🚀 b 𓀀 c<|return|>"
    (item,) = parse_harmony_text(encoding, text, stop=("𓀀",))
    assert item.text == "a 👩‍🚀 b "


def test_beginning_of_a_stop_string_is_text_at_the_token_limit(encoding: HarmonyEncoding) -> None:
    (item,) = parse_harmony_text(encoding, "<|channel|>final<|message|>one ST", "length", stop=("STOP",))
    assert (item.text, item.complete) == ("one ST", False)
