"""The lock of a conversation in a store that several servers share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from penstock.pipeline.errors import ConversationLocked
from penstock.pipeline.protocol.items import Item, Message
from penstock.stages.services.store.store import Store
from tests.support.stored_responses import ITEMS, expire_heartbeats, stored_conversation
from tests.support.stores import open_store


@pytest.fixture
async def other(store_at: str) -> AsyncIterator[Store]:
    """A second server over the same store."""
    async with open_store(store_at) as store:
        yield store


async def items(store: Store) -> tuple[Item, ...]:
    """The items of the conversation."""
    history = await store.conversations.items("conv_1", "")
    assert history is not None
    return history.items


async def test_lock_protects_the_items(store: Store, other: Store) -> None:
    await store.servers.join("http://one")
    await store.conversations.create(stored_conversation(), "", ITEMS[:2])
    await store.conversations.lock("conv_1", "", "resp_1", 2)
    for each in (store, other):
        for items_added in (ITEMS[2:4], ()):
            with pytest.raises(ConversationLocked):
                await each.conversations.add_items("conv_1", "", items_added)
        with pytest.raises(ConversationLocked):
            await each.conversations.delete_item("conv_1", "", "msg_1")
        assert not await each.conversations.delete_item("conv_1", "", "msg_9")
        assert await each.conversations.update("conv_1", "", {"a": "b"})
        assert await items(each) == ITEMS[:2]
    store.conversations.unlock("conv_1", "resp_1")
    assert await store.conversations.add_items("conv_1", "", ITEMS[2:4])
    assert await store.conversations.delete_item("conv_1", "", "msg_1")
    assert await items(store) == ITEMS[1:4]


async def test_lock_of_a_dead_server_does_not_protect(store: Store, other: Store) -> None:
    await store.servers.join("http://one")
    await store.conversations.create(stored_conversation(), "", ITEMS[:2])
    await store.conversations.lock("conv_1", "", "resp_1", 2)
    await expire_heartbeats(store)
    assert await other.conversations.delete_item("conv_1", "", "msg_1")
    assert await store.conversations.add_items("conv_1", "", ITEMS[2:4])
    assert await items(other) == ITEMS[1:4]


def pair(number: int) -> tuple[Item, ...]:
    return tuple(Message(f"msg_{number}{half}", "completed", "user", ()) for half in "ab")


async def add_at_last(store: Store, number: int) -> None:
    """Add two items as soon as the conversation is not locked."""
    while True:
        with suppress(ConversationLocked):
            assert await store.conversations.add_items("conv_1", "", pair(number))
            return


async def lock_now_and_then(store: Store, response_id: str) -> None:
    """Lock the conversation for a moment, if it is free."""
    for _ in range(5):
        with suppress(ConversationLocked):
            await store.conversations.lock("conv_1", "", response_id, len(await items(store)))
            await asyncio.sleep(0)
        store.conversations.unlock("conv_1", response_id)


async def test_concurrent_items_have_unique_places(store: Store, other: Store) -> None:
    servers = {"http://one": store, "http://two": other}
    for url, each in servers.items():
        await each.servers.join(url)
    await store.conversations.create(stored_conversation(), "")
    adding = [add_at_last(each, number) for number, each in enumerate([*servers.values()] * 10)]
    locking = [lock_now_and_then(each, f"resp_{url}") for url, each in servers.items()]
    await asyncio.gather(*adding, *locking)
    row = await items(store)
    numbers = [int(item.id[4:-1]) for item in row[::2]]
    assert sorted(numbers) == list(range(20))
    assert row == tuple(item for number in numbers for item in pair(number))
