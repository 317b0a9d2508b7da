"""Calls and outputs of a conversation, in pairs."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.pairs import behind_calls, callers_of
from tests.support.harmony import call, custom_call, custom_output, message, output

IDS = st.sampled_from("ab")
ITEMS = st.one_of(
    st.builds(lambda call_id: call("f", "{}", call_id), IDS),
    st.builds(lambda call_id: call("f", "{", call_id, status="incomplete"), IDS),
    st.builds(lambda call_id: custom_call("g", "x", call_id), IDS),
    st.builds(lambda call_id: output("1", call_id), IDS),
    st.builds(lambda call_id: custom_output("2", call_id), IDS),
    st.builds(lambda: message("user", "?")),
)


@given(st.lists(ITEMS, max_size=12))
def test_output_belongs_to_an_earlier_call_of_its_kind_and_id(history: list[items.Item]) -> None:
    outputs = {at: item for at, item in enumerate(history) if isinstance(item, items.CallOutput)}
    callers = callers_of(history)
    for at, found in callers.items():
        caller = history[found]
        assert isinstance(caller, items.FunctionCall | items.CustomToolCall)
        assert found < at
        assert type(outputs[at]).__name__ == f"{type(caller).__name__}Output"
        assert caller.call_id == outputs[at].call_id
    for at in outputs.keys() - callers.keys():
        earlier = history[:at]
        assert not any(
            f"{type(item).__name__}Output" == type(outputs[at]).__name__ and item.call_id == outputs[at].call_id
            for item in earlier
            if isinstance(item, items.Call)
        )


@given(st.lists(ITEMS, max_size=12))
def test_outputs_move_behind_their_calls_and_all_else_stays(history: list[items.Item]) -> None:
    moved = behind_calls(history)
    assert Counter(item.id for item in moved) == Counter(item.id for item in history)
    callers = callers_of(history)
    own = {history[at].id: history[caller].id for at, caller in callers.items()}
    after = ""
    for item in moved:
        if item.id in own:
            assert own[item.id] == after
        else:
            after = item.id
    rest = [item.id for item in history if item.id not in own]
    assert [item.id for item in moved if item.id not in own] == rest
