"""Conversations in the store: their items, their locks, and the items that responses add."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.pipeline.errors import ConversationLocked, ConversationNotFound, ItemNotFound
from penstock.pipeline.frames import Origin
from penstock.pipeline.protocol.items import InputText, Item, Message
from penstock.services.store.store import Store, StoredResponse
from tests.support import stored_responses

TOPIC = {"topic": "snakes 🐍"}


async def items(store: Store, conversation_id: str = "conv_1") -> tuple[Item, ...]:
    history = await store.conversations.items(conversation_id, "")
    assert history is not None
    return history.items


async def reply(store: Store, response_id: str, *given: Item, **fields: Any) -> StoredResponse:
    """Have a response read the conversation, run, and be added to it."""
    read = await store.conversations.items("conv_1", "")
    assert read is not None
    position = read.end
    await store.conversations.lock("conv_1", "", response_id, position)
    made = replace(stored_responses.conversation_response(response_id, *given, **fields), origin=Origin("", position))
    if made.response.store:
        store.begin(stored_responses.begun_response(made))
    await store.end(made, None)
    return made


async def test_conversation_is_read_back(store: Store) -> None:
    await store.conversations.create(stored_responses.stored_conversation(**TOPIC), "", stored_responses.ITEMS)
    await store.conversations.create(stored_responses.stored_conversation("conv_2"), "")
    assert await store.conversations.get("conv_1", "") == stored_responses.stored_conversation(**TOPIC)
    assert await items(store) == stored_responses.ITEMS
    assert await items(store, "conv_2") == ()


async def test_unknown_conversation_is_none(store: Store) -> None:
    for name in ("conv_none", "conv_\0", ""):
        assert await store.conversations.get(name, "") is None
        assert await store.conversations.items(name, "") is None
        assert await store.conversations.update(name, "", {}) is None
        assert not await store.conversations.add_items(name, "", stored_responses.ITEMS)
        assert not await store.conversations.delete_item(name, "", "msg_1")
        assert not await store.conversations.delete(name, "")
        with pytest.raises(ConversationNotFound, match="no conversation"):
            await store.conversations.lock(name, "", "resp_1", 0)


async def test_metadata_is_replaced(store: Store) -> None:
    await store.conversations.create(stored_responses.stored_conversation(**TOPIC), "", stored_responses.ITEMS[:1])
    assert await store.conversations.update("conv_1", "", {"a": "\0"}) == stored_responses.stored_conversation(a="\0")
    assert await store.conversations.get("conv_1", "") == stored_responses.stored_conversation(a="\0")
    assert await items(store) == stored_responses.ITEMS[:1]


@pytest.mark.defect("V21")
async def test_conversation_belongs_to_its_owner(store: Store) -> None:
    await store.conversations.create(stored_responses.stored_conversation(), "ann", stored_responses.ITEMS[:2])
    assert await store.conversations.get("conv_1", "bob") is None
    assert await store.conversations.items("conv_1", "bob") is None
    assert await store.conversations.update("conv_1", "bob", TOPIC) is None
    assert not await store.conversations.add_items("conv_1", "bob", stored_responses.ITEMS)
    assert not await store.conversations.delete_item("conv_1", "bob", "msg_1")
    assert not await store.conversations.delete("conv_1", "bob")
    with pytest.raises(ConversationNotFound):
        await store.conversations.lock("conv_1", "bob", "resp_1", 2)
    assert await store.items(["msg_1"], "bob") == {}
    assert await store.items(["msg_1"], "ann") == {"msg_1": stored_responses.ITEMS[0]}
    assert await store.conversations.get("conv_1", "ann") == stored_responses.stored_conversation()
    history = await store.conversations.items("conv_1", "ann")
    assert history is not None
    assert history.items == stored_responses.ITEMS[:2]


async def test_items_keep_their_order(store: Store) -> None:
    await store.conversations.create(stored_responses.stored_conversation(), "", stored_responses.ITEMS[:2])
    assert await store.conversations.add_items("conv_1", "", stored_responses.ITEMS[2:5])
    assert await store.conversations.add_items("conv_1", "", stored_responses.ITEMS[5:])
    assert await items(store) == stored_responses.ITEMS
    first = await store.conversations.items("conv_1", "", upto=3)
    assert first is not None
    assert first.items == stored_responses.ITEMS[:3]


async def test_concurrent_additions_are_all_kept(store: Store, other: Store) -> None:
    await store.conversations.create(stored_responses.stored_conversation(), "")
    named = [Message(f"msg_{n}", "completed", "user", (InputText(""),)) for n in range(20)]
    await asyncio.gather(
        *(
            each.conversations.add_items("conv_1", "", named[n : n + 2])
            for n, each in zip(range(0, 20, 2), [store, other] * 5, strict=True)
        )
    )
    kept = [item.id for item in await items(store)]
    assert sorted(kept) == sorted(item.id for item in named)
    assert all(int(second[4:]) == int(first[4:]) + 1 for first, second in zip(kept[::2], kept[1::2], strict=True))


async def test_item_is_deleted(store: Store) -> None:
    await store.conversations.create(
        stored_responses.stored_conversation(), "", (*stored_responses.ITEMS[:3], stored_responses.ITEMS[0])
    )
    assert not await store.conversations.delete_item("conv_1", "", "msg_none")
    assert not await store.conversations.delete_item("conv_1", "", "\ud800")
    assert await store.conversations.delete_item("conv_1", "", "msg_1")
    assert await items(store) == stored_responses.ITEMS[:3]
    assert await store.conversations.delete_item("conv_1", "", "msg_2")
    assert await store.conversations.add_items("conv_1", "", stored_responses.ITEMS[3:4])
    assert await items(store) == (stored_responses.ITEMS[0], *stored_responses.ITEMS[2:4])


async def test_items_with_impossible_ids_are_kept(store: Store) -> None:
    odd = tuple(
        Message(name, "completed", "user", (InputText("\ud800"),)) for name in ("", "a\0", "\udfff", "x" * 9999)
    )
    await store.conversations.create(stored_responses.stored_conversation(), "", odd)
    assert await items(store) == odd


async def test_deleting_a_conversation_removes_its_items(store: Store) -> None:
    await store.conversations.create(stored_responses.stored_conversation(), "", stored_responses.ITEMS[:2])
    made = await reply(store, "resp_1", stored_responses.ITEMS[3])
    assert await store.conversations.delete("conv_1", "")
    assert not await store.conversations.delete("conv_1", "")
    assert await store.conversations.get("conv_1", "") is None
    assert set(await store.items(["msg_1", "msg_4"], "")) == {"msg_4"}
    assert await store.get("resp_1", "") == made
    history = await stored_responses.history_of(store, "resp_1")
    assert history.items == made.items


@pytest.mark.parametrize("status", ["completed", "incomplete"])
@pytest.mark.parametrize("kept", [True, False])
async def test_response_is_added_with_its_input(store: Store, status: str, *, kept: bool) -> None:
    await store.conversations.create(stored_responses.stored_conversation(), "", stored_responses.ITEMS[:2])
    await store.conversations.lock("conv_1", "", "resp_1", 2)
    made = replace(
        stored_responses.conversation_response("resp_1", stored_responses.ITEMS[3], status=status, store=kept),
        origin=Origin("", 2),
        tokens={"msg_resp_1": (7, 200_000)},
        results={"msg_resp_1": "half a pair \ud800, NUL \0"},
    )
    await store.end(made, None)
    history = await store.conversations.items("conv_1", "")
    assert history is not None
    assert history.items == (*stored_responses.ITEMS[:2], stored_responses.ITEMS[3], *made.response.output)
    assert history.tokens == {"msg_resp_1": (7, 200_000)}
    assert history.results == {"msg_resp_1": "half a pair \ud800, NUL \0"}
    assert await store.results(["msg_resp_1", "msg_4"], "") == history.results
    assert await store.results(["msg_resp_1"], "bob") == {}
    await store.conversations.lock("conv_1", "", "resp_2", 4)


@pytest.mark.parametrize("status", ["failed", "cancelled"])
async def test_failed_response_only_unlocks(store: Store, status: str) -> None:
    await store.conversations.create(stored_responses.stored_conversation(), "", stored_responses.ITEMS[:2])
    await reply(store, "resp_1", stored_responses.ITEMS[3], status=status)
    assert await items(store) == stored_responses.ITEMS[:2]
    await store.conversations.lock("conv_1", "", "resp_2", 2)


async def test_locked_or_changed_conversation_takes_no_response(store: Store, other: Store) -> None:
    await store.servers.join("http://one")
    await store.conversations.create(stored_responses.stored_conversation(), "", stored_responses.ITEMS[:2])
    for position in (1, 3):
        with pytest.raises(ConversationLocked):
            await store.conversations.lock("conv_1", "", "resp_1", position)
    await store.conversations.lock("conv_1", "", "resp_1", 2)
    for each in (store, other):
        with pytest.raises(ConversationLocked):
            await each.conversations.lock("conv_1", "", "resp_2", 2)
    store.conversations.unlock("conv_1", "resp_2")
    with pytest.raises(ConversationLocked):
        await store.conversations.lock("conv_1", "", "resp_2", 2)
    store.conversations.unlock("conv_1", "resp_1")
    assert await store.conversations.get("conv_1", "") == stored_responses.stored_conversation()  # which waits for it
    await other.conversations.lock("conv_1", "", "resp_2", 2)


async def test_cancelled_lock_is_released(store: Store) -> None:
    await store.conversations.create(stored_responses.stored_conversation(), "")
    locking = asyncio.ensure_future(store.conversations.lock("conv_1", "", "resp_1", 0))
    await asyncio.sleep(0)
    locking.cancel()
    store.conversations.unlock("conv_1", "resp_1")
    await asyncio.wait([locking])
    await store.conversations.lock("conv_1", "", "resp_2", 0)


async def test_lock_of_a_dead_server_is_free(store: Store, other: Store) -> None:
    await store.servers.join("http://one")
    await store.conversations.create(stored_responses.stored_conversation(), "")
    await store.conversations.lock("conv_1", "", "resp_1", 0)
    await stored_responses.expire_heartbeats(store)
    await other.conversations.lock("conv_1", "", "resp_2", 0)
    await store.end(stored_responses.conversation_response("resp_1", stored_responses.ITEMS[0], store=False), None)
    assert await items(store) == ()


async def test_orphan_keeps_its_lock_until_it_is_recovered(store: Store, other: Store) -> None:
    await store.conversations.create(stored_responses.stored_conversation(), "")
    await store.conversations.lock("conv_1", "", "resp_1", 0)
    made = stored_responses.conversation_response("resp_1", stored_responses.ITEMS[0], background=True)
    waiting = stored_responses.queued_response(
        "resp_1", stored_responses.ITEMS[0], conversation=made.response.conversation
    )
    await store.accept(waiting, stored_responses.request_of(waiting))
    with pytest.raises(ConversationLocked):
        await other.conversations.lock("conv_1", "", "resp_2", 0)
    (orphan,) = await other.orphans()
    assert await other.claim(orphan)
    await other.end(made, None)
    assert await items(other) == made.items


async def test_history_begins_with_its_conversation(store: Store) -> None:
    await store.conversations.create(stored_responses.stored_conversation(), "", stored_responses.ITEMS[:2])
    first, second = [await reply(store, f"resp_{n}", stored_responses.ITEMS[n + 3]) for n in (1, 2)]
    branch = stored_responses.stored_response("resp_3", stored_responses.ITEMS[2], previous_response_id="resp_1")
    await stored_responses.store_response(store, branch)
    history = await stored_responses.history_of(store, "resp_3")
    assert history.items == (*stored_responses.ITEMS[:2], *first.items, *branch.items)
    history = await stored_responses.history_of(store, "resp_2")
    assert history.items == (*stored_responses.ITEMS[:2], *first.items, *second.items)
    assert await items(store) == history.items


async def test_deleted_items_leave_histories(store: Store) -> None:
    await store.conversations.create(stored_responses.stored_conversation(), "", stored_responses.ITEMS[:3])
    first = await reply(store, "resp_1", stored_responses.ITEMS[3])
    await store.conversations.add_items("conv_1", "", stored_responses.ITEMS[5:7])
    assert await store.conversations.delete_item("conv_1", "", "msg_2")
    assert await store.conversations.delete_item("conv_1", "", stored_responses.ITEMS[5].id)
    history = await stored_responses.history_of(store, "resp_1")
    assert history.items == (stored_responses.ITEMS[0], stored_responses.ITEMS[2], *first.items)


async def test_pages_follow_an_item(store: Store) -> None:
    odd = replace(stored_responses.ITEMS[0], status="incomplete")
    kept = (*stored_responses.ITEMS[:4], odd)  # the first id, twice
    await store.conversations.create(stored_responses.stored_conversation(), "ann", kept)

    async def page(after: str | None, limit: int = 9, *, newest_first: bool = False) -> tuple[Item, ...]:
        return await store.conversations.page("conv_1", "ann", after, limit, newest_first=newest_first)

    assert await page(None) == kept
    assert await page(None, 2) == kept[:2]
    assert await page("msg_2", 1) == kept[2:3]
    assert await page("msg_1") == ()
    assert await page(None, 2, newest_first=True) == (kept[4], kept[3])
    assert await page("msg_3", newest_first=True) == (kept[1], kept[0])
    assert await page("msg_1", newest_first=True) == ()
    assert await store.conversations.delete_item("conv_1", "ann", "msg_3")
    assert await page("msg_2") == kept[3:]
    for missing in ("msg_3", "", "\ud800"):
        with pytest.raises(ItemNotFound):
            await page(missing)
    assert await store.conversations.page("conv_1", "bob", None, 9, newest_first=True) == ()


async def test_items_of_one_conversation_are_found_by_id(store: Store) -> None:
    newer = replace(stored_responses.ITEMS[0], status="incomplete")
    for name, kept in (("conv_1", stored_responses.ITEMS[:2]), ("conv_2", (newer, newer, stored_responses.ITEMS[2]))):
        await store.conversations.create(stored_responses.stored_conversation(name), "ann", kept)
    ids = ["msg_1", "msg_2", "msg_3", "\0"]
    find = store.conversations.find
    assert await find("conv_1", "ann", ids) == {"msg_1": stored_responses.ITEMS[0], "msg_2": stored_responses.ITEMS[1]}
    assert await find("conv_2", "ann", ids) == {"msg_1": newer, "msg_3": stored_responses.ITEMS[2]}
    assert await find("conv_1", "bob", ids) == await find("conv_1", "ann", []) == {}


async def test_known_conversation_follows_changes_of_other_servers(store: Store, other: Store) -> None:
    await store.conversations.create(stored_responses.stored_conversation(), "", stored_responses.ITEMS[:3])
    assert await items(store) == stored_responses.ITEMS[:3]
    await other.conversations.add_items("conv_1", "", stored_responses.ITEMS[3:5])
    assert await items(store) == stored_responses.ITEMS[:5]
    assert await other.conversations.delete_item("conv_1", "", "msg_2")
    await other.conversations.add_items("conv_1", "", stored_responses.ITEMS[5:6])
    assert await items(store) == (stored_responses.ITEMS[0], *stored_responses.ITEMS[2:6])
    assert await other.conversations.delete_item("conv_1", "", stored_responses.ITEMS[5].id)
    assert await items(store) == (stored_responses.ITEMS[0], *stored_responses.ITEMS[2:5])


async def test_deletion_during_a_request_refuses_its_lock(store: Store) -> None:
    await store.conversations.create(stored_responses.stored_conversation(), "", stored_responses.ITEMS[:3])
    before = await store.conversations.items("conv_1", "")
    assert before is not None
    await store.conversations.delete_item("conv_1", "", "msg_1")
    await store.conversations.add_items("conv_1", "", stored_responses.ITEMS[3:4])
    with pytest.raises(ConversationLocked):
        await store.conversations.lock("conv_1", "", "resp_1", before.end)
    after = await store.conversations.items("conv_1", "")
    assert after is not None
    await store.conversations.lock("conv_1", "", "resp_1", after.end)


async def test_conversation_items_are_found_by_id(store: Store) -> None:
    old, new = (Message("msg_1", "completed", "user", (InputText(text),)) for text in ("old", "new"))
    await stored_responses.store_response(store, stored_responses.stored_response("resp_1", old))
    await store.conversations.create(stored_responses.stored_conversation(), "", (new, stored_responses.ITEMS[1]))
    assert await store.items(["msg_1", "msg_2"], "") == {"msg_1": new, "msg_2": stored_responses.ITEMS[1]}
    await stored_responses.store_response(store, stored_responses.stored_response("resp_2", old))
    assert await store.items(["msg_1"], "") == {"msg_1": old}


# Locks of several servers


async def test_lock_protects_the_items(store: Store, other: Store) -> None:
    await store.servers.join("http://one")
    await store.conversations.create(stored_responses.stored_conversation(), "", stored_responses.ITEMS[:2])
    await store.conversations.lock("conv_1", "", "resp_1", 2)
    for each in (store, other):
        for items_added in (stored_responses.ITEMS[2:4], ()):
            with pytest.raises(ConversationLocked):
                await each.conversations.add_items("conv_1", "", items_added)
        with pytest.raises(ConversationLocked):
            await each.conversations.delete_item("conv_1", "", "msg_1")
        assert not await each.conversations.delete_item("conv_1", "", "msg_9")
        assert await each.conversations.update("conv_1", "", {"a": "b"})
        assert await items(each) == stored_responses.ITEMS[:2]
    store.conversations.unlock("conv_1", "resp_1")
    assert await store.conversations.add_items("conv_1", "", stored_responses.ITEMS[2:4])
    assert await store.conversations.delete_item("conv_1", "", "msg_1")
    assert await items(store) == stored_responses.ITEMS[1:4]


async def test_lock_of_a_dead_server_does_not_protect(store: Store, other: Store) -> None:
    await store.servers.join("http://one")
    await store.conversations.create(stored_responses.stored_conversation(), "", stored_responses.ITEMS[:2])
    await store.conversations.lock("conv_1", "", "resp_1", 2)
    await stored_responses.expire_heartbeats(store)
    assert await other.conversations.delete_item("conv_1", "", "msg_1")
    assert await other.conversations.add_items("conv_1", "", stored_responses.ITEMS[2:3])
    assert await store.conversations.add_items("conv_1", "", stored_responses.ITEMS[3:4])
    assert await items(other) == stored_responses.ITEMS[1:4]


def pair(number: int) -> tuple[Item, ...]:
    return tuple(Message(f"msg_{number}{half}", "completed", "user", ()) for half in "ab")


async def add_at_last(store: Store, number: int) -> None:
    while True:
        with suppress(ConversationLocked):
            assert await store.conversations.add_items("conv_1", "", pair(number))
            return


async def lock_now_and_then(store: Store, response_id: str) -> None:
    for _ in range(5):
        with suppress(ConversationLocked):
            await store.conversations.lock("conv_1", "", response_id, len(await items(store)))
            await asyncio.sleep(0)
        store.conversations.unlock("conv_1", response_id)


async def test_concurrent_items_have_unique_places(store: Store, other: Store) -> None:
    servers = {"http://one": store, "http://two": other}
    for url, each in servers.items():
        await each.servers.join(url)
    await store.conversations.create(stored_responses.stored_conversation(), "")
    adding = [add_at_last(each, number) for number, each in enumerate([*servers.values()] * 10)]
    locking = [lock_now_and_then(each, f"resp_{url}") for url, each in servers.items()]
    await asyncio.gather(*adding, *locking)
    row = await items(store)
    numbers = [int(item.id[4:-1]) for item in row[::2]]
    assert sorted(numbers) == list(range(20))
    assert row == tuple(item for number in numbers for item in pair(number))
