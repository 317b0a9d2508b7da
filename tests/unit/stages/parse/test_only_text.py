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
from penstock.stages.parse.harmony.custom_input import CustomInput
from tests.support.parsed_output import parse_harmony_text

PATCH = "*** Begin Patch\n*** End Patch"


def fed(written: str, cuts: Collection[int] = ()) -> tuple[str, bool]:
    machine = CustomInput()
    passed = "".join(machine.feed(written[a:b]) for a, b in pairwise([0, *sorted(cuts), len(written)]))
    rest, is_unwrapped = machine.end()
    return passed + rest, is_unwrapped


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20), st.booleans(), st.data())
def test_only_text_of_an_object_is_the_input(text: str, escapes: bool, data: st.DataObject) -> None:
    gap = st.sampled_from(["", " ", "\n  "])
    quoted = json.dumps(text, ensure_ascii=escapes)
    written = f'{data.draw(gap)}{{{data.draw(gap)}"input"{data.draw(gap)}:{data.draw(gap)}{quoted}{data.draw(gap)}}}'
    assert fed(written, data.draw(st.sets(st.integers(0, len(written))))) == (text, True)


OTHERS = [
    '{"input": "a", "b": 1}',
    '{"input": 3}',
    '{"query": "a"}',
    '{"input": "a"} and',
    '{"input": "a',
    "{",
    "",
    " ",
]


@given(st.sampled_from(OTHERS) | st.text(alphabet=' \n{}":,\\inputax', max_size=30), st.data())
def test_other_input_is_kept_unchanged(written: str, data: st.DataObject) -> None:
    text, is_unwrapped = fed(written, data.draw(st.sets(st.integers(0, len(written)))))
    assert is_unwrapped or text == written
    assert is_unwrapped == fed(written)[1]
    assert not (is_unwrapped and written in OTHERS)


def test_text_that_is_no_object_streams() -> None:
    machine = CustomInput()
    assert [machine.feed(piece) for piece in ("{", '"in', 'dex"', ": 1}")] == ["", "", '{"index"', ": 1}"]


def test_half_of_a_pair_is_replaced() -> None:
    assert fed('{"input": "\\ud83e!"}') == ("\N{REPLACEMENT CHARACTER}!", True)


@pytest.mark.parametrize("header", ["<|constrain|>json", "json", "code", ""])
def test_wrapped_input_is_a_repair(header: str, encoding: HarmonyEncoding) -> None:
    """A later prompt shows the model the form that it should have used."""
    written = json.dumps({"input": PATCH})
    text = f"<|channel|>commentary to=functions.apply_patch {header}<|message|>{written}<|call|>"
    (call,) = parse_harmony_text(encoding, text, tools=Toolset((CustomTool("apply_patch"),)))
    assert (call.kind, call.text, call.repairs, call.token_ids) == ("CustomToolCall", PATCH, ("wrapped input",), ())


def test_input_with_a_grammar_is_kept(encoding: HarmonyEncoding) -> None:
    tool = CustomTool("ask", grammar=Grammar("regex", ".*"))
    text = '<|channel|>commentary to=functions.ask code<|message|>{"input": "a"}<|call|>'
    (call,) = parse_harmony_text(encoding, text, tools=Toolset((tool,)))
    assert (call.text, call.repairs) == ('{"input": "a"}', ())


def test_cut_object_is_kept(encoding: HarmonyEncoding) -> None:
    text = '<|channel|>commentary to=functions.ask code<|message|>{"input": "a'
    (call,) = parse_harmony_text(encoding, text, "length", tools=Toolset((CustomTool("ask"),)))
    assert (call.text, call.complete) == ('{"input": "a', False)
