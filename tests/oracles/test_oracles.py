from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.__main__ import ORACLES, explanations
from tests.oracles.case import Reading, numbered
from tests.oracles.llama_cpp_tests import cases_in

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def call(arguments: str | None) -> Reading:
    return Reading(calls=(("f", arguments),))


def test_each_difference_is_explained_once() -> None:
    assert {oracle for oracle, _, _ in explanations()} <= set(ORACLES)


@given(st.dictionaries(st.text(), VALUES))
def test_spelling_of_arguments_makes_no_difference(arguments: dict[str, Any]) -> None:
    assert call(json.dumps(arguments)).equals(call(json.dumps(arguments, indent=1, ensure_ascii=False)))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ('{"a": 5.0}', '{"a": 5}', True),
        ('{"a": true}', '{"a": 1}', False),
        ('{"a": "5"}', '{"a": 5}', False),
        ('{"a": 5', '{"a": 5}', False),
        ("", "{}", True),
        (None, '{"a": 5}', True),
    ],
)
def test_arguments_are_compared_as_json(one: str | None, other: str, *, equal: bool) -> None:
    assert call(one).equals(call(other)) is equal


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (Reading("a thought", "a message"), True),
        (Reading("\na thought ", "a message\n"), True),
        (Reading("a\nthought", "a message"), False),
        (Reading(None, None), True),
        (Reading("a thought", "another message"), False),
        (Reading("", "a thought a message"), False),
        (Reading("a thought", "a message", (("f", "{}"),)), False),
    ],
)
def test_texts_are_compared_but_for_white_space_at_their_ends(other: Reading, *, equal: bool) -> None:
    assert Reading("a thought", "a message").equals(other) is equal


def test_white_space_beside_calls_does_not_count() -> None:
    assert Reading("", "one two", (("f", "{}"),)).equals(Reading("", "onetwo", (("f", "{}"),)))


def test_outputs_of_one_test_are_numbered() -> None:
    assert list(numbered(iter(["a", "b", "a", "a"]))) == ["a", "b", "a 2", "a 3"]


def test_tester_is_replaced_by_one_that_prints() -> None:
    test = """
static common_chat_tool special_function_tool{ "f" };
struct peg_test_case {
};
struct make_peg_parser {
};
// Fluent builder for PEG parser tests
    void run() {
        test_peg_parser();
    }
};

static void test_msgs_oaicompat_json_conversion() {}
static void test_lfm2_parser() { tst.test("hi").run(); }
static void test_template_generation_prompt() {}
"""
    cases = cases_in(test)
    assert "test_peg_parser" not in cases
    assert "print_case(" in cases
    assert '#line 14 "test-chat.cpp"\nstatic void test_lfm2_parser() { tst.test("hi").run(); }' in cases
