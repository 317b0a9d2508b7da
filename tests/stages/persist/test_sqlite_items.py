"""What SQLite knows of items, and what it forgets when a response is deleted."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

from pipeline.protocol.items import InputText, Message
from stages.persist.sqlite import _PUT, _SCHEMA, SqliteStore, _row
from tests.stages.persist.samples import ITEMS, stored


async def test_items_are_found_by_id(store: SqliteStore) -> None:
    """Every stored item is found by its id, input or output, and what nobody stored is left out."""
    await store.put(stored("resp_1", *ITEMS))
    found = await store.items([*(item.id for item in ITEMS), "msg_resp_1", "msg_none"])
    assert found == {item.id: item for item in (*ITEMS, *stored("resp_1").response.output)}
    assert await store.items([]) == {}


async def test_of_items_with_one_id_the_latest_counts(store: SqliteStore) -> None:
    """An item that was stored twice is what it was stored as last, also where its response was put again."""
    one, two, three = (Message("msg_1", "completed", "user", (InputText(text),)) for text in ("one", "two", "three"))
    await store.put(stored("resp_b", one))
    await store.put(stored("resp_a", two))
    assert await store.items(["msg_1"]) == {"msg_1": two}
    await store.put(stored("resp_b", three))
    assert await store.items(["msg_1", "msg_resp_a"]) == {
        "msg_1": three,
        "msg_resp_a": stored("resp_a").response.output[0],
    }
    await store.put(stored("resp_b"))
    assert await store.items(["msg_1"]) == {"msg_1": two}


async def test_what_is_deleted_is_gone_with_its_items(store: SqliteStore) -> None:
    """Deleting takes the response and its items, and leaves those that another response holds too."""
    await store.put(stored("resp_1", ITEMS[0], ITEMS[1]))
    await store.put(stored("resp_2", ITEMS[0], previous_response_id="resp_1"))
    await store.put(stored("resp_3", previous_response_id="resp_2"))
    assert await store.delete("resp_1")
    assert not await store.delete("resp_1")
    assert await store.get("resp_1") is None
    assert set(await store.items(["msg_1", "msg_2", "msg_resp_1"])) == {"msg_1"}
    assert [each.response.id for each in await store.chain("resp_3")] == ["resp_2", "resp_3"]


async def test_changes_happen_in_their_order(store: SqliteStore) -> None:
    """Puts and deletions that wait together are carried out as they were asked for."""
    changes = (store.put(stored("resp_1")), store.delete("resp_1"), store.put(stored("resp_2")), store.delete("resp_0"))
    assert list(await asyncio.gather(*changes)) == [None, True, None, False]
    assert await store.get("resp_1") is None
    assert await store.get("resp_2") == stored("resp_2")


async def test_an_older_file_learns_its_items(path: Path) -> None:
    """A file of the first schema is brought to today's, and the items in it are found."""
    path.parent.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(_SCHEMA[0])
        for each in (stored("resp_1", *ITEMS), stored("resp_2", ITEMS[0])):
            connection.execute(_PUT, _row(each))
        connection.execute("pragma user_version = 1")
    store = SqliteStore(path)
    assert len(await store.items([item.id for item in ITEMS])) == len(ITEMS)
    assert await store.delete("resp_1")
    assert set(await store.items([item.id for item in ITEMS])) == {"msg_1"}
    await store.close()
