"""Stop strings: the text ends before the first one, and the beginning of one is never sent."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline import frames
from penstock.stages.models.harmony.vocabulary import HarmonyEncoding, load_encoding
from penstock.stages.parse.text import StopStrings
from tests.support.parsed_output import (
    cut_chunks,
    parse_harmony,
    parse_harmony_frames,
    parse_harmony_slowly,
    parse_harmony_text,
    parsed_items,
    token_chunks,
    turn_finished,
    turn_started,
)
from tests.support.stop_strings import check_turn, cut_at_stop

letters = st.text("ab", max_size=30)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def pieces(text: str, cuts: list[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise([0, *sorted(at % (len(text) + 1) for at in cuts), len(text)])]


@given(letters, stop_strings, st.lists(st.integers(0, 30)))
def test_text_ends_at_the_first_stop_string(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    machine = StopStrings(stops)
    passed = [machine.feed(piece) for piece in pieces(text, cuts)]
    before, found = cut_at_stop(text, stops)
    assert ("".join([*passed, machine.flush()]), machine.found) == (before, found)


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
THOUGHT = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize("header", [FINAL, "<|channel|>commentary<|message|>", "<|message|>", "<|channel|>final "])
@pytest.mark.parametrize("end", ["", "<|return|>", f"<|end|><|start|>assistant{CALL}{{}}<|call|>"])
def test_turn_ends_with_a_message_at_its_stop_string(header: str, end: str, encoding: HarmonyEncoding) -> None:
    (item,) = parse_harmony_text(encoding, f"{header}one two STOP three{end}", stop=("STOP",))
    assert (item.kind, item.text, item.complete) == ("Message", "one two ", True)


@pytest.mark.parametrize(("header", "end"), [(THOUGHT, "<|end|>"), (CALL, "<|call|>")])
def test_thoughts_and_arguments_have_no_stop_strings(header: str, end: str, encoding: HarmonyEncoding) -> None:
    (item,) = parse_harmony_text(encoding, f"{header}one two STOP three{end}", stop=("STOP",))
    assert (item.text, item.complete) == ("one two STOP three", True)


Items: TypeAlias = list[tuple[str, str]]

harmony_items = st.lists(st.tuples(st.sampled_from([THOUGHT, CALL, FINAL]), st.text("ab é👩", max_size=12)), max_size=5)
chunk_ends = st.lists(st.integers(0, 300))
any_stops = st.lists(st.text("ab é👩", min_size=1, max_size=3), min_size=1, max_size=3).map(tuple)


@given(harmony_items, any_stops, chunk_ends)
def test_only_messages_of_harmony_are_cut(items: Items, stops: tuple[str, ...], ends: list[int]) -> None:
    encoding = load_encoding()
    text = "<|end|><|start|>assistant".join(f"{header}{text}" for header, text in items)
    tokens = encoding.encode_markup(f"{text}<|end|>" if items else "")
    chunks = cut_chunks(tokens, [end % (len(tokens) + 1) for end in ends], likely=False)
    last = frames.GenerationFinished("length", 0, 0.0)
    whole = parsed_items(parse_harmony_frames(encoding, [turn_started(), *chunks, last]))
    for read in (parse_harmony_frames, parse_harmony_slowly):
        check_turn(read(encoding, [turn_started(stop=stops), *chunks, last]), whole, stops)


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a "), (5, "a END b "), (8, "a END b END c")])
def test_first_tokens_have_no_stop_strings(min_tokens: int, text: str, encoding: HarmonyEncoding) -> None:
    sampling = frames.Sampling(1.0, 1.0, stop=("END",), min_tokens=min_tokens)
    tokens = encoding.encode_markup(f"{FINAL}a END b END c<|return|>")
    assert len(tokens) == 9
    (item,) = parse_harmony(encoding, ([token] for token in tokens), sampling=sampling)
    assert item.text == text


def test_later_tokens_are_neither_read_nor_counted(encoding: HarmonyEncoding) -> None:
    tokens = encoding.encode_markup(f"{FINAL}a END b<|end|><|start|>assistant{CALL}{{}}<|call|>")
    parsed = parse_harmony_frames(
        encoding,
        [turn_started(stop=("END",)), *token_chunks(tokens, 3), frames.GenerationFinished("cancelled", 4, 1.0)],
    )
    finished = turn_finished(parsed)
    assert (finished.reason, finished.output_tokens, finished.cached_tokens) == ("stop", 5, 4)


@pytest.mark.parametrize(("stop_token_ids", "reason"), [((200012,), "stop"), ((200012,), "length"), ((5,), "stop")])
def test_turn_names_the_stop_token_of_its_request(
    stop_token_ids: tuple[int, ...], reason: frames.FinishReason, encoding: HarmonyEncoding
) -> None:
    tokens = encoding.encode_markup(f"{CALL}{{}}<|call|>")
    assert tokens[-1] == 200012
    started = turn_started(sampling=frames.Sampling(1.0, 1.0, stop_token_ids=stop_token_ids))
    parsed = parse_harmony_frames(
        encoding, [started, *token_chunks(tokens, 3), frames.GenerationFinished(reason, 0, 1)]
    )
    ended_by = 200012 if reason == "stop" and 200012 in stop_token_ids else None
    assert turn_finished(parsed).stop_reason == ended_by


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
