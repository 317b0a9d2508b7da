"""The bytes of an owner are those of the columns that hold what clients have sent and models have written."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from penstock.pipeline.frames import Origin
from penstock.services.runs.event_log import Block
from penstock.services.store.rows import octets
from penstock.services.store.store import Store
from tests.support.stored_responses import (
    ITEMS,
    begun_response,
    conversation_response,
    execute_sql,
    request_of,
    stored_conversation,
    stored_response,
)

COLUMNS = (
    "select response, input, tokens, results from responses where owner = $1 and ended_at is not null",
    "select input from responses where owner = $1 and ended_at is null",
    """
    select data from events join responses on responses.id = response_id where owner = $1 and ended_at is not null
    """,
    "select metadata from conversations where owner = $1",
    """
    select item, tokens, result from conversation_items
    join conversations on conversations.id = conversation_id where owner = $1
    """,
)


async def columns_of(store: Store, owner: str) -> int:
    await store.writer.flushed()
    return sum([octets(*row) for sql in COLUMNS for row in await store.context.read(sql, owner)])


async def check(store: Store) -> dict[str, int]:
    """Return the bytes of each owner, after comparing them with the columns."""
    counted = {owner: await columns_of(store, owner) for owner in ("ann", "bob", "eve")}
    assert {owner: await store.bytes_of(owner) for owner in counted} == counted
    assert await store.bytes_of(None) == sum(counted.values())
    return counted


async def end(store: Store, owner: str, response_id: str, **fields: Any) -> None:
    made = replace(
        stored_response(response_id, *ITEMS[:3], **fields), origin=Origin(owner, 0), tokens={"msg_1": (7, 200_000)}
    )
    store.begin(begun_response(made))
    store.append(response_id, Block(0, 1, b"first"))
    await store.end(replace(made, results={"msg_1": "Grüße"}), Block(1, 2, b"second"))


async def test_responses_count_with_their_events_until_they_are_deleted(store: Store) -> None:
    assert await check(store) == {"ann": 0, "bob": 0, "eve": 0}
    running = replace(stored_response("resp_0", ITEMS[0]), origin=Origin("eve", 0))
    await store.accept(replace(running, response=begun_response(running).response), request_of(running))
    await end(store, "ann", "resp_1")
    await end(store, "bob", "resp_2")
    before = await check(store)
    assert all(before.values())
    await store.sweep(3600, -60)  # the events go
    after = await check(store)
    assert [before[owner] - after[owner] for owner in before] == [11, 11, 0]
    await store.delete("resp_1", "ann")
    assert await check(store) == {**after, "ann": 0}


async def test_conversations_count_with_their_items_until_they_are_deleted(store: Store) -> None:
    conversations = store.conversations
    await conversations.create(stored_conversation("conv_1", topic="Grüße"), "ann", ITEMS[:4])
    await conversations.create(stored_conversation("conv_2"), "bob")
    await check(store)
    await conversations.add_items("conv_1", "ann", ITEMS[4:8])
    await conversations.delete_item("conv_1", "ann", "msg_1")
    await conversations.delete_item("conv_1", "ann", "msg_1")
    await conversations.update("conv_2", "bob", {"topic": "weather"})
    assert (await check(store))["ann"] > 0
    made = conversation_response("resp_1", ITEMS[9], conversation_id="conv_2")
    await conversations.lock("conv_2", "bob", "resp_1", 0)
    await store.end(replace(made, origin=Origin("bob", 0), tokens={"msg_resp_1": (7,)}), None)
    await check(store)
    await conversations.delete_item("conv_2", "bob", "msg_resp_1")
    await check(store)
    await conversations.delete("conv_2", "bob")
    assert (await check(store))["bob"] == 0


async def test_responses_of_an_older_release_do_not_count(store: Store) -> None:
    await end(store, "ann", "resp_1")
    await execute_sql(store, "update responses set bytes = 0")
    await store.sweep(3600, -60)
    assert await store.bytes_of("ann") == 0
