"""The text input of a tool, which a chat model writes as JSON."""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.parse.chat.unwrap import Unwrapped


def unwrapped(text: str, cuts: Collection[int] = ()) -> str:
    machine = Unwrapped("input")
    spans = pairwise([0, *sorted(cuts), len(text)])
    return "".join(machine.feed(text[a:b]) for a, b in spans) + machine.flush()


@st.composite
def spelled(draw: st.DrawFn, text: str) -> str:
    """Any spelling of a JSON string."""
    spellings = []
    for letter in text:
        codes = letter.encode("utf-16-be")
        escaped = "".join(f"\\u{codes[at]:02x}{codes[at + 1]:02x}" for at in range(0, len(codes), 2))
        plain = json.dumps(letter, ensure_ascii=False)[1:-1]
        spellings.append(draw(st.sampled_from([plain, plain, escaped, escaped.upper().replace("\\U", "\\u")])))
    return "".join(spellings)


@given(st.data())
def test_every_spelling_in_any_pieces_gives_the_same_text(data: st.DataObject) -> None:
    text = data.draw(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20))
    gap = st.sampled_from(["", " ", "\n  "])
    spelling = data.draw(spelled(text))
    document = (
        f'{data.draw(gap)}{{{data.draw(gap)}"input"{data.draw(gap)}:{data.draw(gap)}"{spelling}"{data.draw(gap)}}}'
    )
    assert json.loads(document) == {"input": text}
    assert unwrapped(document, data.draw(st.sets(st.integers(0, len(document))))) == text


@given(st.text(alphabet=' \n{}[]":,\\uinputd83e0ax\U0001f9d1', max_size=30), st.data())
def test_other_input_in_any_pieces_gives_the_same_text(document: str, data: st.DataObject) -> None:
    assert unwrapped(document, data.draw(st.sets(st.integers(0, len(document))))) == unwrapped(document)


@pytest.mark.parametrize(
    "raw", ["ls -l", '{"code": "x", "n": 1}', '["input"]', "{input: 1}", '{"output": 3}', "{}", '{"input"', " "]
)
def test_other_input_is_kept_unchanged(raw: str) -> None:
    assert unwrapped(raw) == raw


@pytest.mark.parametrize("raw", ['{"code": "x"}', '"x"'])
def test_text_under_another_name_or_alone_is_the_input(raw: str) -> None:
    for cut in range(len(raw)):
        assert unwrapped(raw, {cut}) == "x"


@pytest.mark.parametrize("value", ['{"a": ["}", {}]}', '[1, "]"]', "3", "-2.5e3", "true", "null", "{}"])
def test_value_that_is_no_string_is_kept_as_json(value: str) -> None:
    for document in (f'{{"input": {value}}}', f'{{"input":{value} , "other": 1}}'):
        for cut in range(len(document)):
            assert unwrapped(document, {cut}) == value


def test_text_argument_streams() -> None:
    machine = Unwrapped("input")
    assert [machine.feed(piece) for piece in ('{"in', 'put": "a', "b\\", "nc\\ud83e", "\\uddd1", '"}')] == [
        *("", "a", "b", "\nc", "🧑", "")
    ]


@pytest.mark.parametrize(
    ("cut", "text"), [('{"input": "a', "a"), ('{"input": "a\\', "a�"), ('{"input": "\\ud83e', "�")]
)
def test_truncated_object_keeps_its_text(cut: str, text: str) -> None:
    assert unwrapped(cut) == text


def test_endless_key_is_passed_on() -> None:
    """It is not scanned again with each of its pieces."""
    machine = Unwrapped("input")
    pieces = [machine.feed(text) for text in ['{"', *["x" * 100] * 100]]
    assert pieces[-1] == "x" * 100
    assert "".join(pieces) + machine.flush() == '{"' + "x" * 10_000


def test_truncated_markup_is_dropped() -> None:
    for beginning in ('{"', '{"input": ', '{"input": "\\', '{"input": "\\ud83e'):
        machine = Unwrapped("input")
        assert machine.feed(beginning) + machine.flush(cut=True) == ""
