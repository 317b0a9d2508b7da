"""Stored responses: they are read back unchanged, by their owner only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.pipeline.errors import StreamExpired
from penstock.pipeline.frames import Origin
from penstock.pipeline.protocol import response
from penstock.pipeline.protocol.items import InputText, Message, OutputItem
from penstock.services.runs.event_log import Block
from penstock.services.store.database import NullDatabase, Row, Value
from penstock.services.store.store import Store
from tests.support.stored_responses import ITEMS, begun_response, history_of, store_response, stored_response
from tests.support.stores import open_store

OWNED = {
    f"resp_{owner}": replace(stored_response(f"resp_{owner}"), origin=Origin(owner)) for owner in ("", "ann", "bob")
}


async def test_every_item_is_read_back(store: Store) -> None:
    output = tuple(item for item in ITEMS if isinstance(item, OutputItem))
    kept = replace(
        stored_response("resp_1", *ITEMS, output=output),
        tokens={"msg_3": (200_005, 35644, 0), "rs_1": (1,)},
        results={"ci_1": "7\n", "ws_1": "half a pair \ud800, NUL \0"},
    )
    await store_response(store, kept)
    assert await store.get("resp_1", "") == kept


@pytest.mark.parametrize(
    "fields",
    [
        {
            "status": "incomplete",
            "incomplete_details": response.IncompleteDetails("max_output_tokens"),
            "completed_at": None,
        },
        {"status": "failed", "error": response.ErrorDetails("server_error", "It broke."), "output": ()},
        {"status": "cancelled", "completed_at": None},
        {"usage": response.Usage(7, response.InputTokensDetails(3), 5, response.OutputTokensDetails(2), 12)},
        {"tool_choice": {"type": "function", "name": "weather"}, "previous_response_id": "resp_0", "metadata": {}},
        {
            "instructions": "half a pair \ud800, NUL \0",
            "model": "\udfff",
            "metadata": {"\ud83d": "🐍", "big": "9" * 99},
        },
    ],
)
async def test_every_status_is_read_back(store: Store, fields: dict[str, Any]) -> None:
    await store_response(store, stored_response("resp_1", **fields))
    assert await store.get("resp_1", "") == stored_response("resp_1", **fields)


async def test_unknown_id_is_none(store: Store) -> None:
    assert await store.get("resp_none", "") is None
    assert await store.chain("resp_none", "") == ()
    assert await store.blocks("resp_none") == ()
    assert await store.queued("resp_none") is None
    assert await store.runner("resp_none") is None
    assert not await store.delete("resp_none", "")


@pytest.mark.parametrize("name", ["", "resp_\0", "resp_\ud800", "x" * 10_000])
async def test_impossible_id_is_unknown(store: Store, name: str) -> None:
    assert await store.get(name, "") is None
    assert await store.chain(name, "") == ()
    assert await store.items([name], "") == {}
    assert not await store.delete(name, "")
    assert await store.conversations.get(name, "") is None
    assert not await store.conversations.delete(name, "")


async def test_running_response_can_be_read(store: Store) -> None:
    first = stored_response("resp_1", ITEMS[0])
    store.begin(begun_response(first))
    store.append("resp_1", Block(0, 2, b"ab"))
    assert await store.get("resp_1", "") == begun_response(first)
    assert await store.blocks("resp_1") == (Block(0, 2, b"ab"),)
    assert await store.items(["msg_1", "msg_resp_1"], "") == {"msg_1": ITEMS[0]}
    store.append("resp_1", Block(2, 5, b"\0"))
    ended = store.end(first, Block(7, 1, b""))
    assert await store.get("resp_1", "") == first
    assert ended.done()
    assert await store.blocks("resp_1") == (Block(0, 2, b"ab"), Block(2, 5, b"\0"), Block(7, 1, b""))


async def test_second_beginning_changes_nothing(store: Store) -> None:
    await store_response(store, stored_response("resp_1"))
    store.begin(begun_response(stored_response("resp_1", ITEMS[0])))
    store.append("resp_1", Block(0, 1, b"late"))
    assert await store.get("resp_1", "") == stored_response("resp_1")
    assert await store.blocks("resp_1") == ()


async def test_chain_is_ordered_from_oldest_to_newest(store: Store) -> None:
    first, second = stored_response("resp_b"), stored_response("resp_c", previous_response_id="resp_b")
    third = stored_response("resp_a", ITEMS[0], previous_response_id="resp_c")
    aside = stored_response("resp_d", previous_response_id="resp_b")
    for each in (third, aside, first, second):
        await store_response(store, each)
    assert await store.chain("resp_a", "") == (first, second, third)
    assert await store.chain("resp_b", "") == (first,)


async def test_chain_begins_after_a_missing_ancestor(store: Store) -> None:
    await store_response(store, stored_response("resp_1"))
    await store_response(store, stored_response("resp_3", previous_response_id="resp_2"))
    await store_response(store, stored_response("resp_4", previous_response_id="resp_3"))
    assert [each.response.id for each in await store.chain("resp_4", "")] == ["resp_3", "resp_4"]


async def test_known_chain_reads_only_what_is_new(store: Store) -> None:
    for number in range(1, 4):
        await store_response(store, stored_response(f"resp_{number}", previous_response_id=f"resp_{number - 1}"))
    first = await store.chain("resp_3", "")
    read, decoded = store.context.database.read, list[int]()

    async def counted(sql: str, *arguments: Value) -> Sequence[Row]:
        found = await read(sql, *arguments)
        decoded.extend(len(found) for _ in found if "tokens" in sql)
        return found

    store.context.database.read = counted  # type: ignore[method-assign]  # counts the responses that are read
    assert await store.chain("resp_3", "") == first
    assert decoded == []
    await store_response(store, stored_response("resp_4", previous_response_id="resp_3"))
    assert await store.chain("resp_4", "") == (*first, stored_response("resp_4", previous_response_id="resp_3"))
    assert decoded == [1]


async def test_known_chain_forgets_what_another_server_deleted(store: Store, other: Store) -> None:
    for number in range(1, 4):
        await store_response(store, stored_response(f"resp_{number}", previous_response_id=f"resp_{number - 1}"))
    assert len(await store.chain("resp_3", "")) == 3
    assert await other.delete("resp_1", "")
    assert [each.response.id for each in await store.chain("resp_3", "")] == ["resp_2", "resp_3"]


async def test_running_response_is_read_again_after_its_end(store: Store) -> None:
    ended = stored_response("resp_1", ITEMS[0])
    store.begin(begun_response(ended))
    assert await store.chain("resp_1", "") == (begun_response(ended),)
    await store.end(ended, None)
    assert await store.chain("resp_1", "") == (ended,)


async def test_history_has_items_tokens_and_results_of_the_chain(store: Store) -> None:
    first = replace(stored_response("resp_1", ITEMS[0]), tokens={"msg_resp_1": (1, 2)}, results={"ci_1": "7"})
    second = replace(stored_response("resp_2", ITEMS[1], previous_response_id="resp_1"), tokens={"msg_resp_2": (3,)})
    second = replace(second, results={"ci_2": "", "ws_1": "a page"})
    for each in (first, second):
        await store_response(store, each)
    history = await history_of(store, "resp_2")
    assert history.items == (*first.items, *second.items)
    assert history.tokens == {"msg_resp_1": (1, 2), "msg_resp_2": (3,)}
    assert history.results == {"ci_1": "7", "ci_2": "", "ws_1": "a page"}


@pytest.mark.defect("46")
async def test_branches_are_isolated(store: Store) -> None:
    root = stored_response("resp_root", ITEMS[0])
    branches = [stored_response(f"resp_{n}", ITEMS[n], previous_response_id="resp_root") for n in (1, 2)]
    await store_response(store, root)
    await asyncio.gather(*(store_response(store, branch) for branch in branches))
    for branch in branches:
        assert await store.chain(branch.response.id, "") == (root, branch)
    assert await store.get("resp_root", "") == root


@pytest.mark.defect("V16")
async def test_continuing_run_does_not_change_its_parent(store: Store) -> None:
    await store_response(store, stored_response("resp_1"))
    store.begin(begun_response(stored_response("resp_2", ITEMS[0], previous_response_id="resp_1")))
    store.append("resp_2", Block(0, 1, b"x"))
    assert await store.get("resp_1", "") == stored_response("resp_1")
    history = await history_of(store, "resp_2")
    assert history.items == (*stored_response("resp_1").items, ITEMS[0])


@pytest.mark.defect("V21")
async def test_response_belongs_to_its_owner(store: Store) -> None:
    for kept in OWNED.values():
        await store_response(store, kept)
    for response_id, kept in OWNED.items():
        for owner in ("", "ann", "bob"):
            is_theirs = owner == kept.origin.owner
            assert await store.get(response_id, owner) == (kept if is_theirs else None)
            assert await store.chain(response_id, owner) == ((kept,) if is_theirs else ())
            assert bool(await store.items([f"msg_{response_id}"], owner)) is is_theirs
            assert is_theirs or not await store.delete(response_id, owner)
    assert await store.delete("resp_ann", "ann")
    assert await store.get("resp_bob", "bob") == OWNED["resp_bob"]


@pytest.mark.defect("V21")
async def test_id_cannot_be_taken_over(store: Store) -> None:
    await store_response(store, OWNED["resp_ann"])
    thief = replace(stored_response("resp_ann", ITEMS[0], model="other"), origin=Origin("bob"))
    await store_response(store, thief)
    assert await store.get("resp_ann", "bob") is None
    assert await store.get("resp_ann", "ann") == OWNED["resp_ann"]
    assert await store.items(["msg_1"], "bob") == {}


async def test_chain_ends_at_another_owner(store: Store) -> None:
    await store_response(store, OWNED["resp_ann"])
    await store_response(
        store, replace(stored_response("resp_1", previous_response_id="resp_ann"), origin=Origin("bob"))
    )
    assert [each.response.id for each in await store.chain("resp_1", "bob")] == ["resp_1"]


async def test_items_are_found_by_id(store: Store) -> None:
    await store_response(store, stored_response("resp_1", *ITEMS))
    found = await store.items([*(item.id for item in ITEMS), "msg_resp_1", "msg_none"], "")
    assert found == {item.id: item for item in (*ITEMS, *stored_response("resp_1").response.output)}
    assert await store.items([], "") == {}
    assert len(await store.items([f"msg_{n}" for n in range(2_000)], "")) == 4


async def test_items_with_impossible_ids_are_stored(store: Store) -> None:
    names = ("", "a\0b", "\ud800", "x" * 10_000, "fine")
    items = tuple(Message(name, "completed", "user", (InputText(name),)) for name in names)
    await store_response(store, stored_response("resp_1", *items))
    assert await store.get("resp_1", "") == stored_response("resp_1", *items)
    assert await store.items(names, "") == {"fine": items[-1]}


async def test_latest_item_of_an_id_counts(store: Store) -> None:
    one, two = (Message("msg_1", "completed", "user", (InputText(text),)) for text in ("one", "two"))
    await store_response(store, stored_response("resp_b", one))
    await store_response(store, stored_response("resp_a", two))
    assert await store.items(["msg_1"], "") == {"msg_1": two}
    assert await store.delete("resp_a", "")
    assert await store.items(["msg_1"], "") == {"msg_1": one}


async def test_deleting_removes_items_and_events(store: Store) -> None:
    for number, items in ((1, (ITEMS[0], ITEMS[1])), (2, (ITEMS[0],)), (3, ())):
        store.begin(
            begun_response(stored_response(f"resp_{number}", *items, previous_response_id=f"resp_{number - 1}"))
        )
        store.append(f"resp_{number}", Block(0, 1, b"x"))
        await store.end(stored_response(f"resp_{number}", *items, previous_response_id=f"resp_{number - 1}"), None)
    assert await store.delete("resp_1", "")
    assert not await store.delete("resp_1", "")
    assert await store.get("resp_1", "") is None
    assert await store.blocks("resp_1") == ()
    assert await store.blocks("resp_2") == (Block(0, 1, b"x"),)
    assert set(await store.items(["msg_1", "msg_2", "msg_resp_1"], "")) == {"msg_1"}
    assert [each.response.id for each in await store.chain("resp_3", "")] == ["resp_2", "resp_3"]


async def test_listener_that_raises_keeps_no_deletion_from_its_answer(store: Store) -> None:
    def broken(_: str) -> None:
        raise ZeroDivisionError

    heard = list[str]()
    store.context.at_deletion += [broken, heard.append]
    await store_response(store, stored_response("resp_1", ITEMS[0]))
    assert await store.delete("resp_1", "")
    assert heard == ["resp_1"]


async def test_deleted_running_response_stays_deleted(store: Store) -> None:
    store.begin(begun_response(stored_response("resp_1", ITEMS[0])))
    assert await store.delete("resp_1", "")
    store.append("resp_1", Block(0, 1, b"x"))
    await store.end(stored_response("resp_1", ITEMS[0]), Block(1, 1, b"y"))
    assert await store.get("resp_1", "") is None
    assert await store.blocks("resp_1") == ()
    assert await store.items(["msg_1", "msg_resp_1"], "") == {}


@pytest.mark.defect("18")
async def test_data_survives_a_restart(store_at: str) -> None:
    for number in (1, 2):
        async with open_store(store_at) as store:
            await store_response(store, stored_response(f"resp_{number}"))
    async with open_store(store_at) as store:
        assert [await store.get(f"resp_{n}", "") for n in (1, 2)] == [
            stored_response("resp_1"),
            stored_response("resp_2"),
        ]


@pytest.mark.defect("18")
async def test_two_servers_share_a_store(store: Store, store_at: str) -> None:
    async with open_store(store_at) as other:
        await asyncio.gather(
            *(store_response(each, stored_response(f"resp_{n}")) for n, each in enumerate([store, other] * 20))
        )
        assert await other.get("resp_0", "") == stored_response("resp_0")
        assert await store.get("resp_39", "") == stored_response("resp_39")


async def test_expired_log_is_an_error(store: Store) -> None:
    await store_response(store, stored_response("resp_1"))
    assert await store.blocks("resp_1") == ()
    await store.sweep(keep_responses=3600, keep_logs=-1)
    with pytest.raises(StreamExpired, match="no longer kept"):
        await store.blocks("resp_1")
    assert await store.get("resp_1", "") == stored_response("resp_1")


async def test_results_are_found_by_item_id(store: Store) -> None:
    made = replace(stored_response("resp_1"), results={"msg_resp_1": "7", "ci_1": ""}, origin=Origin("ann"))
    await store_response(store, made)
    again = replace(stored_response("resp_2", *made.response.output), results={"msg_resp_2": "8"}, origin=Origin("ann"))
    await store_response(store, again)
    wanted = ["msg_resp_1", "msg_resp_2", "msg_none", "\0"]
    assert await store.results(wanted, "ann") == {"msg_resp_1": "7", "msg_resp_2": "8"}
    assert await store.results(wanted, "bob") == {}
    assert await store.results([], "ann") == {}
    assert await store.delete("resp_1", "ann")
    assert await store.results(wanted, "ann") == {"msg_resp_2": "8"}


async def test_servers_of_one_store_share_its_secrets(store: Store, other: Store) -> None:
    secret = await store.secret("seal")
    assert len(secret) == 32
    assert await store.secret("seal") == secret
    assert await store.secret("other") != secret
    assert await other.secret("seal") == secret


async def test_servers_without_a_store_have_secrets_of_their_own() -> None:
    assert await Store(NullDatabase()).secret("seal") != await Store(NullDatabase()).secret("seal")
