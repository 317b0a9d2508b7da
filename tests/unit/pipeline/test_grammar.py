"""Automata of grammars, against Python's `re` for the same rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.grammar import Automaton
from penstock.pipeline.lifecycle.rules import InvariantBroken


class A: ...


class B: ...


class C:
    def __init__(self, variant: str = "new") -> None:
        self.variant = variant


FRAMES: Mapping[str, Any] = {"a": A(), "b": B(), "n": C("new"), "o": C("old")}
LETTERS = {"A": "a", "B": "b", "AB": "[ab]", "C": "[no]", "C[new]": "n", "C[old]": "o", "Part": "(?:ab*)"}


def automaton(rule: str) -> Automaton:
    kinds = {"A": A, "B": B, "C": C, "AB": A | B}
    rules = {"Whole": rule, "Part": "A . B*"}
    return Automaton("Whole", rules, kinds, lambda frame: getattr(frame, "variant", ""))


def problem(compiled: Automaton, letters: Iterable[str]) -> str:
    """The problem of a sequence of frames; an empty text if the automaton takes it."""
    state = compiled.start
    try:
        for letter in letters:
            state = state.after(FRAMES[letter])
        state.finish()
    except InvariantBroken as broken:
        return str(broken)
    return ""


RULES = st.recursive(
    st.sampled_from(list(LETTERS)),
    lambda rules: st.one_of(
        st.tuples(rules, st.sampled_from("*+?")).map(lambda parts: f"({parts[0]}){parts[1]}"),
        st.lists(rules, min_size=2, max_size=3).map(lambda parts: " . ".join(f"({part})" for part in parts)),
        st.lists(rules, min_size=2, max_size=3).map(" | ".join),
    ),
    max_leaves=8,
)


@given(RULES, st.lists(st.text("abno", max_size=6), min_size=1, max_size=20))
def test_automaton_takes_what_the_regular_expression_takes(rule: str, sequences: list[str]) -> None:
    expression = re.sub(r"[\w\[\]]+", lambda word: LETTERS[word[0]], rule)
    expression = re.sub(r"[\s.]", "", expression)
    compiled = automaton(rule)
    for sequence in sequences * 2:  # the second time, all states are known
        assert (problem(compiled, sequence) == "") == (re.fullmatch(expression, sequence) is not None)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ("b", "after the start: expected A or C[old], got B"),
        ("", "after the start: expected A or C[old], got the end"),
        ("a", "after A: expected A, B or C[old], got the end"),
        ("an", "after A: expected A, B or C[old], got C[new]"),
        ("oo", "after C[old]: expected the end, got C[old]"),
    ],
)
def test_message_has_what_was_expected_and_what_came(sequence: str, message: str) -> None:
    assert problem(automaton("A* . (A . B* | C[old])"), "aab") == ""
    assert problem(automaton("A* . (A . B+ | C[old])"), sequence) == message
