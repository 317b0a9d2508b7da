"""The tokens of calls that clients send back as texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.pipeline.frames import TokenIds
from penstock.pipeline.protocol.items import (
    CustomToolCall,
    FunctionCall,
    Item,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
)
from penstock.services.recent_calls import MOST_BYTES, RecentCalls

THOUGHT = Reasoning("rs_1", content=(ReasoningText("Hm."),))
PREAMBLE = Message("msg_2", "completed", "assistant", (OutputText("I look."),))
CALL = FunctionCall("fc_3", "call_3", "look", '{"city" : "Oslo", "days": 1}', "completed")
PATCH = CustomToolCall("ctc_4", "call_4", "patch", "*** Begin", "completed")
WRITTEN: Mapping[str, TokenIds] = {"rs_1": (1, 2), "msg_2": (3,), "fc_3": (4, 5), "ctc_4": (6,)}


@pytest.fixture
def calls() -> RecentCalls:
    calls = RecentCalls()
    calls.keep((THOUGHT, PREAMBLE, CALL, PATCH), "alice", "tiny", WRITTEN)
    return calls


async def known(calls: RecentCalls, *items: Item, owner: str = "alice", reads: bool = True) -> dict[str, TokenIds]:
    _, tokens = await calls.restored(items, owner, lambda _: reads)
    return dict(tokens)


async def test_calls_have_their_tokens_and_those_of_what_comes_before_them(calls: RecentCalls) -> None:
    assert await known(calls, THOUGHT, PREAMBLE, CALL, PATCH) == WRITTEN
    assert await known(calls, CALL) == {"fc_3": (4, 5)}


@pytest.mark.parametrize("spelled", ['{"city":"Oslo","days":1}', '{"days": 1, "city": "\\u004fslo"}'])
async def test_call_in_another_spelling_is_in_the_words_of_the_model(calls: RecentCalls, spelled: str) -> None:
    for _ in range(2):
        items, tokens = await calls.restored([replace(CALL, arguments=spelled)], "alice", lambda _: True)
        assert (items, tokens) == ((CALL,), {"fc_3": (4, 5)})


@pytest.mark.parametrize(
    "changed",
    [
        {"arguments": '{"city": "Oslo", "days": true}'},
        {"arguments": '{"city": "Oslo", "days": 1.0}'},
        {"arguments": '{"city": "Oslo"}'},
        {"arguments": "Oslo"},
        {"arguments": ""},
        {"name": "other"},
        {"namespace": "other"},
        {"call_id": "call_9", "id": "fc_9"},
    ],
    ids=str,
)
async def test_changed_call_has_no_tokens(calls: RecentCalls, changed: dict[str, Any]) -> None:
    other = replace(CALL, **changed)
    assert await calls.restored([THOUGHT, PREAMBLE, other], "alice", lambda _: True) == ((THOUGHT, PREAMBLE, other), {})


async def test_changed_item_before_a_call_has_no_tokens_and_neither_have_those_before(calls: RecentCalls) -> None:
    other = replace(PREAMBLE, content=(OutputText("You look."),))
    assert await known(calls, THOUGHT, other, CALL) == {"fc_3": (4, 5)}
    assert await known(calls, replace(THOUGHT, content=(ReasoningText("Ah."),)), PREAMBLE, CALL) == {
        "msg_2": (3,),
        "fc_3": (4, 5),
    }


async def test_tokens_are_of_the_owner_and_of_models_with_the_same_tokens(calls: RecentCalls) -> None:
    assert await known(calls, CALL, owner="bob") == {}
    assert await known(calls, CALL, reads=False) == {}


async def test_call_is_found_by_the_id_of_its_item(calls: RecentCalls) -> None:
    """Messages has ids of its own for calls."""
    assert await known(calls, replace(CALL, call_id="toolu_3")) == {"fc_3": (4, 5)}


async def test_call_without_tokens_or_end_is_not_kept() -> None:
    calls = RecentCalls()
    calls.keep((replace(CALL, status="incomplete"),), "", "tiny", WRITTEN)
    calls.keep((CALL,), "", "tiny", {})
    assert await known(calls, CALL, owner="") == {}


async def test_room_of_an_owner_is_bounded() -> None:
    calls = RecentCalls()
    long = (7,) * (MOST_BYTES // 4 // 10)
    for number in range(8):
        named = replace(CALL, id=f"fc_{number}", call_id=f"call_{number}")
        calls.keep((named,), "alice", "tiny", {named.id: long})
    kept = [number for number in range(8) if await known(calls, replace(CALL, call_id=f"call_{number}", id="fc_x"))]
    assert kept == [4, 5, 6, 7]
