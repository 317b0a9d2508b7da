"""The input of a custom tool, written as it is or as JSON arguments."""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.protocol.tools import CustomTool, Grammar, Toolset
from penstock.stages.models.harmony.vocabulary import HarmonyEncoding
from penstock.stages.parse.only_text import OnlyText
from tests.support.parsed_output import parse_harmony_text

PATCH = "*** Begin Patch\n*** End Patch"


def fed(written: str, cuts: Collection[int] = (), *, is_json: bool = False) -> tuple[str, bool]:
    machine = OnlyText(is_json=is_json)
    passed = "".join(machine.feed(written[a:b]) for a, b in pairwise([0, *sorted(cuts), len(written)]))
    rest, is_unwrapped = machine.end()
    return passed + rest, is_unwrapped


TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)


@given(TEXTS, st.sampled_from(["input", "code", "patch"]) | TEXTS, st.booleans(), st.data())
def test_only_text_of_an_object_is_the_input(text: str, key: str, escapes: bool, data: st.DataObject) -> None:
    gap = st.sampled_from(["", " ", "\n  "])
    quoted, name = json.dumps(text, ensure_ascii=escapes), json.dumps(key, ensure_ascii=escapes)
    written = f"{data.draw(gap)}{{{data.draw(gap)}{name}{data.draw(gap)}:{data.draw(gap)}{quoted}{data.draw(gap)}}}"
    assert fed(written, data.draw(st.sets(st.integers(0, len(written)))), is_json=data.draw(st.booleans())) == (
        text,
        True,
    )


@given(TEXTS, st.data())
def test_string_is_its_text_in_json_alone(text: str, data: st.DataObject) -> None:
    written = json.dumps(text, ensure_ascii=data.draw(st.booleans()))
    cuts = data.draw(st.sets(st.integers(0, len(written))))
    assert fed(written, cuts, is_json=True) == (text, True)
    assert fed(written, cuts) == (written, False)


OTHERS = [
    '{"input": "a", "b": 1}',
    '{"input": 3}',
    '{"a": "b", "a": "c"}',
    '{"query": {"a": "b"}}',
    '["a"]',
    '{"a"}',
    '"a" or "b"',
    '{"input": "a"} and',
    '{"input": "a',
    "{",
    "",
    " ",
]


@given(st.sampled_from(OTHERS) | st.text(alphabet=' \n{}":,\\inputax', max_size=30), st.data())
def test_other_input_is_kept_unchanged(written: str, data: st.DataObject) -> None:
    is_json = data.draw(st.booleans())
    text, is_unwrapped = fed(written, data.draw(st.sets(st.integers(0, len(written)))), is_json=is_json)
    assert is_unwrapped or text == written
    assert is_unwrapped == fed(written, is_json=is_json)[1]
    assert not (is_unwrapped and written in OTHERS)


@pytest.mark.parametrize(
    ("pieces", "passed"),
    [
        (("{", '"in', 'dex"', ": 1}"), ("", "", "", '{"index": 1}')),
        (('{"a": "b', '"', ', "c": ', "2}"), ("", "", '{"a": "b", "c": ', "2}")),
        (("SELECT", ' "a"'), ("SELECT", ' "a"')),
        (('"a', '" or', " b"), ('"a', '" or', " b")),
        (('{"' + "x" * 300, "y"), ('{"' + "x" * 300, "y")),
    ],
)
def test_other_text_streams_as_soon_as_it_is_known(pieces: tuple[str, ...], passed: tuple[str, ...]) -> None:
    machine = OnlyText()
    assert tuple(map(machine.feed, pieces)) == passed


def test_half_of_a_pair_is_replaced() -> None:
    assert fed('{"input": "\\ud83e!"}') == ("\N{REPLACEMENT CHARACTER}!", True)


@pytest.mark.parametrize("header", ["<|constrain|>json", "json", "code", ""])
@pytest.mark.parametrize("key", ["input", "patch"])
def test_wrapped_input_is_a_repair(header: str, key: str, encoding: HarmonyEncoding) -> None:
    """A later prompt shows the model the form that it should have used."""
    written = json.dumps({key: PATCH})
    text = f"<|channel|>commentary to=functions.apply_patch {header}<|message|>{written}<|call|>"
    (call,) = parse_harmony_text(encoding, text, tools=Toolset((CustomTool("apply_patch"),)))
    assert (call.kind, call.text, call.repairs, call.token_ids) == ("CustomToolCall", PATCH, ("wrapped input",), ())


@pytest.mark.parametrize(
    ("header", "text"), [("<|constrain|>json", "a word"), ("json", "a word"), ("code", '"a word"'), ("", '"a word"')]
)
def test_string_counts_as_json_if_the_header_says_so(header: str, text: str, encoding: HarmonyEncoding) -> None:
    """A phrase in quotes may be what a tool for search wants."""
    written = f'<|channel|>commentary to=functions.find {header}<|message|>"a word"<|call|>'
    (call,) = parse_harmony_text(encoding, written, tools=Toolset((CustomTool("find"),)))
    assert call.text == text


def test_input_with_a_grammar_is_kept(encoding: HarmonyEncoding) -> None:
    tool = CustomTool("ask", grammar=Grammar("regex", ".*"))
    text = '<|channel|>commentary to=functions.ask code<|message|>{"input": "a"}<|call|>'
    (call,) = parse_harmony_text(encoding, text, tools=Toolset((tool,)))
    assert (call.text, call.repairs) == ('{"input": "a"}', ())


def test_cut_object_is_kept(encoding: HarmonyEncoding) -> None:
    text = '<|channel|>commentary to=functions.ask code<|message|>{"input": "a'
    (call,) = parse_harmony_text(encoding, text, "length", tools=Toolset((CustomTool("ask"),)))
    assert (call.text, call.complete) == ('{"input": "a', False)
