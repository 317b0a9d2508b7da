"""Calls and their results in the messages of a conversation."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.dialects.messages.blocks import Turn
from penstock.extensions.dialects.messages.messages import Conversation
from penstock.pipeline.errors import InvalidRequest

IDS = st.lists(st.sampled_from("abc"), max_size=3)
ROUNDS = st.lists(st.tuples(IDS, IDS), max_size=4)
"""The ids of calls in a message of the assistant, and of the results in the next one of the user."""

TEXT = {"type": "text", "text": "Hi"}


def conversation(rounds: list[tuple[list[str], list[str]]]) -> list[Turn]:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    for calls, results in rounds:
        used = [{"type": "tool_use", "id": call_id, "name": "f", "input": {}} for call_id in calls]
        answered = [{"type": "tool_result", "tool_use_id": call_id, "content": "5"} for call_id in results]
        messages += [{"role": "assistant", "content": [TEXT, *used]}, {"role": "user", "content": [*answered, TEXT]}]
    return msgspec.convert(messages, list[Turn])


def is_paired(rounds: list[tuple[list[str], list[str]]], call_id: str) -> bool:
    """Return True if a result follows each call with an id, before the next one with the same id."""
    events = "".join("c" * calls.count(call_id) + "r" * results.count(call_id) for calls, results in rounds)
    return re.fullmatch("(cr)*", events) is not None


@given(st.one_of(ROUNDS, ROUNDS.map(lambda rounds: [(calls, calls) for calls, _ in rounds])))
def test_conversation_is_read_if_each_call_has_one_result(rounds: list[tuple[list[str], list[str]]]) -> None:
    turns = conversation(rounds)
    if all(is_paired(rounds, call_id) for call_id in "abc"):
        items = Conversation(turns).items
        assert sum(item.type == "function_call" for item in items) == sum(len(calls) for calls, _ in rounds)
        return
    with pytest.raises(InvalidRequest) as refused:
        Conversation(turns)
    assert refused.value.message.endswith(f" (at {refused.value.param})")
