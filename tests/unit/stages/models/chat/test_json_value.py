"""The end of a JSON value, before any text and in any pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.models.chat.json_value import ValueEnd, unquoted

LEAVES = st.none() | st.booleans() | st.integers() | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def end_of(text: str, cuts: set[int]) -> int | None:
    machine = ValueEnd()
    for a, b in pairwise([0, *sorted(cuts), len(text)]):
        if (end := machine.feed(text[a:b])) is not None:
            return a + end
    return None


@given(VALUES.filter(lambda value: isinstance(value, str | list | dict)), st.text(), st.data())
def test_end_of_value_is_found(value: object, behind: str, data: st.DataObject) -> None:
    spelled = data.draw(st.sampled_from(["", "\n "])) + json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    text = spelled + behind
    assert end_of(text, data.draw(st.sets(st.integers(0, len(text))))) == len(spelled)


@given(VALUES, st.data())
def test_unfinished_value_has_no_end(value: object, data: st.DataObject) -> None:
    spelled = json.dumps(value)
    cut = spelled[: data.draw(st.integers(0, len(spelled) - 1))]
    assert end_of(cut, data.draw(st.sets(st.integers(0, len(cut))))) is None


@given(st.text(alphabet=' {}[]"\\a1'), st.data())
def test_result_does_not_depend_on_pieces(text: str, data: st.DataObject) -> None:
    assert end_of(text, data.draw(st.sets(st.integers(0, len(text))))) == end_of(text, set())


@pytest.mark.parametrize(("literal", "text"), [('"a\\n"', "a\n"), ('"a\nb"', "a\nb"), ('"\\q"', "\\q")])
def test_malformed_strings_are_taken_literally(literal: str, text: str) -> None:
    assert unquoted(literal) == text


@given(st.text() | st.text(st.sampled_from("a\ud800")))
def test_any_string_is_read_as_text_that_can_be_sent(text: str) -> None:
    """A lone surrogate in an event would end its response."""
    read = unquoted(json.dumps(text))
    assert read == text or "?" in read
    read.encode()
