"""Waits that are learned: shares are shares, and certain waits are foreseen."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.extensions.hints.waits import (
    BELIEF,
    CANCELLED,
    CHILD,
    CLIENT,
    LONGEST,
    MEMORY,
    MOST_NAMES,
    MOST_OWNERS,
    AllWaits,
    Waits,
)

NAMES = st.sampled_from(("shell", "read", CLIENT, CHILD, CANCELLED))
SECONDS = st.floats(0, 10 * LONGEST) | st.just(math.inf)


@given(st.lists(st.tuples(NAMES, SECONDS)), NAMES)
def test_outlook_is_a_probability_within_a_time(noted: list[tuple[str, float]], what: str) -> None:
    waits = Waits()
    for name, seconds in noted:
        waits.note(name, seconds)
    outlook = waits.outlook(what)
    assert 0 <= outlook.share <= 1
    assert 0 < outlook.seconds <= LONGEST


@given(st.floats(0.05, LONGEST / 2), st.sampled_from((0, MEMORY)))
@settings(max_examples=20)
def test_tool_that_always_takes_as_long_is_foreseen(seconds: float, before: int) -> None:
    """It is, also after a time in which its waits had no end."""
    waits = Waits()
    for _ in range(before):
        waits.note("shell", math.inf)
    for _ in range(4 * MEMORY):
        waits.note("shell", seconds)
    outlook = waits.outlook("shell")
    assert outlook.share > 0.9
    assert seconds <= outlook.seconds <= 2 * seconds


def test_few_waits_of_a_tool_are_beside_those_of_all_tools() -> None:
    waits = Waits()
    for _ in range(100):
        waits.note("shell", 60)
    assert 60 <= waits.outlook("new").seconds < 120
    waits.note("new", 0.1)
    assert 60 <= waits.outlook("new").seconds < 120
    for _ in range(int(100 * BELIEF)):
        waits.note("new", 0.1)
    assert waits.outlook("new").seconds < 1


def test_keys_and_tools_that_waited_last_are_known() -> None:
    """However many there are."""
    every = AllWaits()
    for number in range(MOST_OWNERS + 10):
        every.of(str(number)).note("shell", 60)
    waits = every.of("10")
    learned = waits.outlook("shell")
    assert every.of("9").outlook("shell") != learned
    for number in range(MOST_NAMES):
        waits.note(str(number), 60)
    assert len(waits._named) == MOST_NAMES  # noqa: SLF001


def test_what_is_kept_is_worth_more_for_a_tool_than_for_a_person_and_a_child() -> None:
    waits = Waits()
    outlooks = [waits.outlook(what) for what in ("shell", CLIENT, CHILD)]
    rates = [outlook.share / outlook.seconds for outlook in outlooks]
    assert rates == sorted(rates, reverse=True)


def test_longest_of_parallel_calls_is_the_slowest_tool() -> None:
    waits = Waits()
    for _ in range(50):
        waits.note("tests", 300)
        waits.note("read", 0.1)
    assert waits.longest(("read", "tests", "read")) == "tests"
