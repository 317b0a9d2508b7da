"""Conversations that a server knows: what each event says of those in the cache, and that none is kept for ever."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.hints import talks as module
from penstock.extensions.hints.talks import FORGOTTEN_AT_ONCE, Asker, Talk, Talks
from penstock.extensions.hints.waits import LONGEST
from penstock.services.engines.engine import CacheHint

FORKS = [("resp_2", False, "let_go"), ("resp_1", False, "fetch"), ("resp_1", True, "let_go"), (None, False, "let_go")]
"""The response that a turn follows after two, if these were cancelled, and what it says of the conversation."""


def told(hints: Iterable[CacheHint]) -> list[tuple[str, str]]:
    return [(hint.action, hint.session) for hint in hints]


def answer(talks: Talks, key: str, *calls: str, at: float = 0, session: str = "", tokens: int = 100) -> list[CacheHint]:
    """A turn whose answer comes at once."""
    return [*talks.asked(key, session, tokens, at), *talks.answered(key, f"resp_{key}", calls, tokens, at)]


def test_call_is_out_until_its_output_comes_and_its_wait_is_learned() -> None:
    talks = Talks()
    for at in range(0, 6_000, 60):
        answer(talks, "a", "shell", at=at)
    *_, kept = answer(talks, "a", "shell", at=6_000)
    assert (kept.action, kept.session, kept.response_id, kept.tokens) == ("keep", "a", "resp_a", 100)
    assert kept.share > 0.9
    assert 60 <= kept.seconds < 90


@pytest.mark.parametrize(("tokens", "hint"), [(49, "let_go"), (50, "fetch"), (200, "fetch")])
def test_next_prompt_fetches_the_old_one_and_a_much_shorter_one_lets_it_go(tokens: int, hint: str) -> None:
    talks = Talks()
    answer(talks, "a")
    assert told(talks.asked("a", "", tokens, 1)) == [(hint, "a")]


def test_none_of_the_conversations_with_one_name_is_let_go() -> None:
    talks = Talks()
    answer(talks, "a")
    talks.share("a")
    assert told(answer(talks, "a", at=1, tokens=10)) == [("fetch", "a"), ("keep", "a")]
    assert told(talks.over("a")) == []
    list(talks.asked("b", "", 100, 2))
    list(talks.asked("b", "", 10, 3))  # the second does not wait for the first
    list(talks.answered("b", "resp_b", (), 100, 4))
    assert told(talks.over("b")) == []
    assert told(talks.asked("c", "", 10, 5 + LONGEST)) == [("let_go", "a"), ("let_go", "b")]


def test_turns_of_one_response_are_one_conversation() -> None:
    """Between them the server runs tools."""
    talks = Talks()
    for _ in range(3):
        assert told(talks.asked("a", "", 100, 0, ("resp_1",))) == []
    list(talks.answered("a", "resp_1", (), 100, 1))
    assert told(talks.over("a")) == [("let_go", "a")]


@pytest.mark.parametrize(("previous", "is_cancelled", "hint"), FORKS)
def test_branches_of_a_chain_do_not_let_each_other_go(previous: str | None, is_cancelled: bool, hint: str) -> None:
    talks = Talks()
    for number in (1, 2):
        list(talks.asked("a", "", 100, number, (f"resp_{number}",)))
        list(talks.answered("a", f"resp_{number}", (), 100, number, is_cancelled=is_cancelled))
    talks.fork("a", previous)
    assert told(talks.asked("a", "", 10, 3)) == [(hint, "a")]


def test_no_key_learns_from_the_waits_of_another() -> None:
    talks = Talks()
    before = talks.waits("other").outlook("shell")
    for number in range(1_000):
        list(talks.asked("a", "", 100, number, asker=Asker("one")))
        list(talks.answered("a", "resp_a", ("shell",), 100, number))
        list(talks.over("a"))
    assert talks.waits("other").outlook("shell") == before
    assert talks.waits("one").outlook("shell").share < before.share / 10


def test_conversation_that_makes_room_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TALKS", 4)
    talks = Talks()
    before = talks.waits().outlook("shell")
    for number in range(100):
        answer(talks, str(number), "shell")
    assert talks.waits().outlook("shell") == before


def test_children_go_when_they_answer_and_the_last_of_them_brings_their_parent_back() -> None:
    talks = Talks()
    answer(talks, "parent", "task", session="s")
    answer(talks, "other", session="t")
    list(talks.asked("one", "s", 10, 1))
    list(talks.asked("two", "s", 10, 1))
    assert told(talks.answered("one", "resp_one", (), 10, 2)) == [("let_go", "one")]
    assert told(talks.answered("two", "resp_two", ("read",), 10, 3)) == [("keep", "two")]
    assert told(answer(talks, "two", at=4)) == [("fetch", "two"), ("let_go", "two"), ("fetch", "parent")]
    assert told(talks.asked("parent", "s", 100, 5)) == [("fetch", "parent")]
    assert told(talks.asked("other", "t", 100, 5)) == [("fetch", "other")]


def test_children_are_kept_where_they_go_on() -> None:
    talks = Talks()
    for number in range(30):
        answer(talks, f"parent {number}", "task", session="s")
        answer(talks, f"child {number}", session="s")
        answer(talks, f"child {number}", session="s", at=1)
    assert ("keep", "child 29") in told(answer(talks, "child 29", session="s", at=2))


def test_conversation_without_an_event_is_let_go_and_forgotten() -> None:
    talks = Talks()
    answer(talks, "a", "shell")
    list(talks.asked("never answered", "", 10, 1))
    assert told(talks.asked("b", "", 10, LONGEST + 1)) == [("let_go", "a"), ("let_go", "never answered")]
    assert told(talks.over("a")) == []
    assert told(talks.answered("a", "resp_a", (), 10, LONGEST + 2)) == []


def test_cancelled_response_waits_for_its_client_whatever_it_called() -> None:
    talks = Talks()
    list(talks.asked("a", "", 10, 0))
    [kept] = talks.answered("a", "resp_a", ("shell",), 10, 0, is_cancelled=True)
    assert kept.seconds > talks.waits().outlook("shell").seconds


def test_forgotten_conversations_of_a_session_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each began while the one before it waited for a call."""
    monkeypatch.setattr(module, "MOST_TALKS", 4)
    talks, others = Talks(), number_of_talks()
    for number in range(100):
        answer(talks, str(number), "task", session="s")
    assert number_of_talks() - others <= 5


def number_of_talks() -> int:
    gc.collect()
    return sum(type(each) is Talk for each in gc.get_objects())


def test_turn_looks_at_few_of_the_conversations_of_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    talks, looks = Talks(), list[Talk]()
    answer(talks, "parent", "task", session="s")
    for number in range(1_000):
        answer(talks, f"child {number}", session="s")
        list(talks.asked(f"running {number}", "s", 10, 0))
    for name in ("has_calls", "is_done"):
        monkeypatch.setattr(Talk, name, property(partial(looked, looks, getattr(Talk, name).fget)))
    answer(talks, "another", session="s")
    assert 0 < len(looks) < 10


def looked(looks: list[Talk], tell: Callable[[Talk], bool], talk: Talk) -> bool:
    looks.append(talk)
    return tell(talk)


def test_turn_forgets_few_of_those_that_are_due() -> None:
    talks = Talks()
    for number in range(1_000):
        answer(talks, str(number))
    assert len(list(talks.asked("next", "", 10, LONGEST))) == FORGOTTEN_AT_ONCE


EVENTS = st.tuples(
    st.sampled_from(("asked", "answered", "called", "cancelled", "over")),
    st.sampled_from("abcdef"),
    st.sampled_from(("", "s", "t")),
    st.floats(0, LONGEST),
)


def known(talks: Talks, key: str) -> bool:
    return talks.named(f"resp_{key}") is not None


def told_of(talks: Talks, event: str, key: str, session: str, now: float) -> list[CacheHint]:
    if event == "asked":
        return [*talks.asked(key, session, 100, now, (f"resp_{key}",))]
    if event == "over":
        return [*talks.over(key)]
    calls = ("shell", "read") if event == "called" else ()
    return [*talks.answered(key, "resp", calls, 100, now, is_cancelled=event == "cancelled")]


@given(st.lists(EVENTS, max_size=60))
def test_any_order_of_events_leaves_nothing_behind(events: list[tuple[str, str, str, float]]) -> None:
    """What is let go is known no more, and after the longest wait none is."""
    talks, now = Talks(), 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_TALKS", 4)
        for event, key, session, pause in events:
            now += pause
            for hint in told_of(talks, event, key, session, now):
                assert hint.action == "let_go" or known(talks, hint.session)
        list(talks.asked("last", "", 1, now + LONGEST + 1))
        list(talks.over("last"))
    assert told(talks.asked("next", "s", 1, now + 3 * LONGEST)) == []
    assert not any(known(talks, key) for key in "abcdef")
