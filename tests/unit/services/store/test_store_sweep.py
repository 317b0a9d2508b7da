"""The sweep: expired data goes, and data in use stays."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.services.runs.event_log import Block
from penstock.services.store.store import Store
from tests.support.stored_responses import (
    ITEMS,
    begun_response,
    execute_sql,
    queued_response,
    request_of,
    store_response,
    stored_conversation,
    stored_response,
)

LONG = 3600.0
"""A retention time in seconds that keeps everything in these tests."""

AT_ONCE = -60.0
"""A retention time in seconds after which everything that has ended is expired."""


async def rows(store: Store, table: str) -> int:
    ((count,),) = await store.context.read(f"select count(*) from {table}")
    return int(count)


async def test_old_response_is_removed_with_its_data(store: Store) -> None:
    store.begin(begun_response(stored_response("resp_1", ITEMS[0])))
    store.append("resp_1", Block(0, 1, b"x"))
    await store.end(stored_response("resp_1", ITEMS[0]), Block(1, 1, b"y"))
    assert (await store.sweep(LONG, LONG)).responses == 1
    assert await store.get("resp_1", "") == stored_response("resp_1", ITEMS[0])
    assert (await store.sweep(AT_ONCE, AT_ONCE)).responses == 0
    assert await store.get("resp_1", "") is None
    assert await store.blocks("resp_1") == ()
    assert await rows(store, "items") == 0
    assert await rows(store, "events") == 0


async def test_logs_may_expire_before_their_responses(store: Store) -> None:
    store.begin(begun_response(stored_response("resp_1", ITEMS[0])))
    await store.end(stored_response("resp_1", ITEMS[0]), Block(0, 1, b"x"))
    await store.sweep(LONG, AT_ONCE)
    assert await store.get("resp_1", "") == stored_response("resp_1", ITEMS[0])
    assert await rows(store, "events") == 0


async def test_unfinished_responses_stay(store: Store) -> None:
    store.begin(begun_response(stored_response("resp_1")))
    store.append("resp_1", Block(0, 1, b"x"))
    await store.accept(queued_response("resp_2"), request_of(queued_response("resp_2")))
    await store.sweep(AT_ONCE, AT_ONCE)
    assert await store.get("resp_1", "") == begun_response(stored_response("resp_1"))
    assert await store.blocks("resp_1") == (Block(0, 1, b"x"),)
    assert await store.get("resp_2", "") == queued_response("resp_2")


async def test_continued_responses_stay(store: Store) -> None:
    for number in range(1, 4):
        await store_response(store, stored_response(f"resp_{number}", previous_response_id=f"resp_{number - 1}"))
    store.begin(begun_response(stored_response("resp_4", previous_response_id="resp_3")))
    await store_response(store, stored_response("resp_other"))
    assert (await store.sweep(AT_ONCE, LONG)).responses == 4
    assert len(await store.chain("resp_4", "")) == 4
    await store.end(stored_response("resp_4", previous_response_id="resp_3"), None)
    assert (await store.sweep(AT_ONCE, LONG)).responses == 0


@pytest.mark.defect("V25")
async def test_any_number_of_old_responses_is_removed(store: Store) -> None:
    ends = []
    for number in range(1_200):
        kept = stored_response(f"resp_{number}", ITEMS[0])
        store.begin(begun_response(kept))
        ends.append(store.end(kept, Block(0, 1, b"x")))
    await asyncio.gather(*ends)
    await execute_sql(store, f"update responses set ended_at = {time.time() - 10 * LONG} where id <> 'resp_17'")
    report = await store.sweep(LONG, LONG)
    assert report.responses == 1
    assert await store.get("resp_17", "") == stored_response("resp_17", ITEMS[0])
    assert await store.blocks("resp_17") == (Block(0, 1, b"x"),)


async def test_sweep_reports_the_rest(store: Store) -> None:
    nothing = await store.sweep(LONG, LONG)
    assert nothing.responses == 0
    assert nothing.oldest_age == 0
    for number, age in enumerate((5, 500, 50)):
        await store_response(store, stored_response(f"resp_{number}"))
        await execute_sql(store, f"update responses set created_at = created_at - {age} where id = 'resp_{number}'")
    report = await store.sweep(LONG, LONG)
    assert report.responses == 3
    assert 500 <= report.oldest_age < 560
    assert report.bytes > 10_000


async def test_sweep_frees_the_memory_of_what_is_gone(store: Store) -> None:
    await store_response(store, stored_response("resp_1"))
    await store.conversations.create(stored_conversation(), "", ITEMS[:1])
    assert len(await store.chain("resp_1", "")) == 1
    assert await store.conversations.items("conv_1", "") is not None
    assert store._known.get("resp_1")
    assert store.conversations._known.get("conv_1")
    await store.sweep(keep_responses=-1, keep_logs=-1)
    assert store._known.get("resp_1") is None
    assert store.conversations._known.get("conv_1") is None
