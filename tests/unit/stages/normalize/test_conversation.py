"""Requests that belong to a conversation, and its owner."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import Origin
from penstock.pipeline.protocol.items import FunctionCall, FunctionCallOutput, Item
from penstock.pipeline.protocol.response import ConversationReference, ResponseStatus
from penstock.services.store.store import Store
from penstock.services.store.stored import StoredConversation
from tests.support.request_bodies import WEATHER
from tests.support.requests import answer, normalize, store_answer, user_message

CALL = FunctionCall("fc_1", "call_1", "get_weather", "{}", "completed")
RAIN = FunctionCallOutput("fco_1", "call_1", "rain", "completed")


async def conversation_of(store: Store, *items: Item, owner: str = "") -> str:
    """The id of a new conversation that has these items."""
    await store.conversations.create(StoredConversation("conv_1", 0, {}), owner, items)
    return "conv_1"


@pytest.mark.defect("33")
@pytest.mark.parametrize("as_object", [False, True])
async def test_conversation_is_the_history(store: Store, as_object: bool) -> None:
    name = await conversation_of(store, user_message("msg_a", "Hi"), answer("Hello."))
    resolved = await normalize(store, conversation={"id": name} if as_object else name, input="Go on")
    assert resolved.history == (user_message("msg_a", "Hi"), answer("Hello."))
    assert resolved.facts.input == (user_message("msg_1i0000", "Go on"),)
    assert resolved.facts.origin == Origin("", 2)
    assert resolved.facts.response.conversation == ConversationReference(name)
    assert (await normalize(store, input="Hi")).facts.response.conversation is UNSET


async def test_conversation_grows_with_its_responses(store: Store) -> None:
    name = await conversation_of(store)
    await store_answer(
        store, "1", CALL, input="How is Oslo?", conversation=name, tools=[WEATHER], tokens={"fc_1": (7,)}
    )
    output = {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "rain"}
    await store_answer(store, "2", answer("Rain."), input=[output], conversation=name)
    third = await normalize(store, "3", input="And Rome?", conversation=name)
    assert third.history == (user_message("msg_1i0000", "How is Oslo?"), CALL, RAIN, answer("Rain."))
    assert (third.facts.origin.position, third.tokens) == (4, {"fc_1": (7,)})


@pytest.mark.parametrize(("status", "length"), [("completed", 2), ("incomplete", 2), ("failed", 0), ("cancelled", 0)])
async def test_failed_response_is_not_added(store: Store, status: ResponseStatus, length: int) -> None:
    """A failed or cancelled response leaves its conversation unchanged, so it can be requested again."""
    name = await conversation_of(store)
    await store_answer(store, "1", answer("Hello."), status=status, input="Hi", conversation=name)
    again = await normalize(store, "2", input="Hi", conversation=name)
    assert len(again.history) == length


async def test_unstored_response_is_added(store: Store) -> None:
    """``store`` is about the response, not about its conversation."""
    name = await conversation_of(store)
    await store_answer(store, "1", answer("Hello."), input="Hi", conversation=name, store=False)
    assert await store.get("resp_1", "") is None
    history = (await normalize(store, "2", conversation=name)).history
    assert history == (user_message("msg_1i0000", "Hi"), answer("Hello."))


async def test_response_of_a_conversation_can_be_continued_alone(store: Store) -> None:
    """Its history is the conversation of its time, without later items."""
    name = await conversation_of(store, user_message("msg_a", "Hi"), answer("Hello."))
    await store_answer(store, "1", answer("one"), input="1", conversation=name)
    await store_answer(store, "2", answer("two"), input="2", conversation=name)
    branch = await normalize(store, "3", input="Go on", previous_response_id="resp_1")
    earlier = (user_message("msg_a", "Hi"), answer("Hello."))
    assert branch.history == (*earlier, user_message("msg_1i0000", "1"), answer("one"))
    assert branch.facts.response.conversation is UNSET


async def test_call_without_its_output_waits_in_the_conversation(store: Store) -> None:
    name = await conversation_of(store, CALL)
    output = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
    assert len((await normalize(store, input=[output], conversation=name)).facts.input) == 1
    with pytest.raises(InvalidRequest) as caught:
        await normalize(store, input=[{**output, "call_id": "call_2"}], conversation=name)
    assert caught.value.param == "input[0].call_id"


async def test_item_is_in_a_conversation_once(store: Store) -> None:
    name = await conversation_of(store, user_message("msg_a", "Hi"))
    items = [{"type": "item_reference", "id": "msg_a"}, {"role": "user", "id": "msg_a", "content": "Hello?"}]
    resolved = await normalize(store, input=items, conversation=name)
    assert resolved.facts.input == (user_message("msg_1i0001", "Hello?"),)


async def test_empty_conversation_needs_an_input(store: Store) -> None:
    name = await conversation_of(store)
    with pytest.raises(InvalidRequest, match="needs an input") as caught:
        await normalize(store, conversation=name)
    assert caught.value.param == "input"


UNKNOWN, MALFORMED = (404, "conversation_not_found"), (400, "invalid_value")


@pytest.mark.parametrize(
    ("missing", "answer"),
    [
        ("conv_0", UNKNOWN),
        ("conv_\x00", UNKNOWN),
        ("conv_\ufffd" * 1000, UNKNOWN),
        ("", MALFORMED),
        ("resp_1", MALFORMED),
    ],
)
async def test_unknown_conversation_is_not_found(store: Store, missing: str, answer: tuple[int, str]) -> None:
    """It is a 404, even though a body names it, unless no conversation can have such an id."""
    await conversation_of(store)
    with pytest.raises(InvalidRequest) as caught:
        await normalize(store, input="Hi", conversation=missing)
    error = caught.value
    assert (error.status, error.code, error.param) == (*answer, "conversation")
    assert len(error.message) < 300


# Owners


@pytest.mark.defect("V21")
@pytest.mark.parametrize(
    "body",
    [
        {"input": "Hi", "previous_response_id": "resp_1"},
        {"input": "Hi", "conversation": "conv_1"},
        {"input": [{"type": "item_reference", "id": "msg_Hello."}]},
        {"input": [{"id": "msg_1i0000"}]},
    ],
    ids=str,
)
async def test_other_owners_objects_are_not_found(store: Store, body: dict[str, Any]) -> None:
    """The error is word for word the same as for an object that does not exist."""
    await conversation_of(store, owner="alice")
    await store_answer(store, "1", answer("Hello."), owner="alice", input="Hi")
    assert (await normalize(store, "2", owner="alice", **body)).facts.origin.owner == "alice"
    with pytest.raises(InvalidRequest) as theirs:
        await normalize(store, "2", owner="bob", **body)
    await store.delete("resp_1", "alice")
    await store.conversations.delete("conv_1", "alice")
    with pytest.raises(type(theirs.value)) as nobodys:
        await normalize(store, "2", owner="bob", **body)
    for name in ("message", "status", "code", "param"):
        assert getattr(theirs.value, name) == getattr(nobodys.value, name)
