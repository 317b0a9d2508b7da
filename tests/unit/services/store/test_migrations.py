"""Databases of another version: older ones are migrated when they are opened, newer ones are used if they can be."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeAlias

import asyncpg
import msgspec
import pytest
from msgspec.structs import replace

from penstock.pipeline.errors import StoreFailed
from penstock.pipeline.frames import Origin
from penstock.services.store import postgres as postgres_database
from penstock.services.store import sqlite as sqlite_database
from penstock.services.store.database import Value
from penstock.services.store.migrations import POSTGRES, SQLITE, Schema
from tests.support.stored_responses import ITEMS, conversation_response, store_response, stored_response
from tests.support.stores import open_store

Change: TypeAlias = tuple[str, tuple[Value, ...]]

WITHOUT_RESULTS = {"sqlite": 28, "postgres": 15}
"""The number of schema statements of a database from before results were kept."""

RESPONSE = """
    insert into responses (id, owner, position, created_at, ended_at, status, logged, response, input, tokens)
    values ($1, 'ann', 0, 1800000000, 1800000002, 'completed', 0, $2, $3, $4)
"""
ITEM = "insert into items (owner, id, stored_at, response_id) values ('ann', $1, 1800000002, 'resp_1')"
CONVERSATION = """
    insert into conversations (id, owner, created_at, metadata, length)
    values ('conv_1', 'ann', 1800000000, '{}', 1)
"""
CONVERSATION_ITEM = """
    insert into conversation_items (conversation_id, position, id, stored_at, item, tokens)
    values ('conv_1', 0, 'msg_1', 1800000000, $1, $2)
"""


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


OLD = stored_response("resp_1", *ITEMS[:2])
LEFT: tuple[Change, ...] = (
    (RESPONSE, ("resp_1", _json(OLD.response), _json(OLD.input), msgspec.msgpack.encode({"msg_resp_1": (1, 2)}))),
    (ITEM, ("msg_1",)),
    (CONVERSATION, ()),
    (CONVERSATION_ITEM, (_json(ITEMS[0]), msgspec.msgpack.encode((3,)))),
)


async def leave(store_at: str, changes: Iterable[Change]) -> None:
    """Create a database in the schema from before results were kept, and apply ``changes`` to it."""
    if store_at.startswith("postgresql:"):
        connection = await asyncpg.connect(store_at)
        for statement in POSTGRES.statements[: WITHOUT_RESULTS["postgres"]]:
            await connection.execute(statement)
        for sql, arguments in changes:
            await connection.execute(sql, *arguments)
        await connection.execute("create table schema_version (version bigint not null)")
        await connection.execute(f"insert into schema_version values ({WITHOUT_RESULTS['postgres']})")
        await connection.close()
        return
    Path(store_at).parent.mkdir()
    with closing(sqlite3.connect(store_at, isolation_level=None)) as file:
        for statement in SQLITE.statements[: WITHOUT_RESULTS["sqlite"]]:
            file.execute(statement)
        for sql, arguments in changes:
            file.execute(sql, {str(number): argument for number, argument in enumerate(arguments, 1)})
        file.execute(f"pragma user_version = {WITHOUT_RESULTS['sqlite']}")


async def test_database_without_results_is_migrated(store_at: str) -> None:
    await leave(store_at, LEFT)
    for number in (2, 3):  # the second time nothing is left to migrate
        async with open_store(store_at) as store:
            older = await store.get("resp_1", "ann")
            assert older == replace(OLD, origin=Origin("ann"), tokens={"msg_resp_1": (1, 2)})
            assert await store.items(["msg_1"], "ann") == {"msg_1": ITEMS[0]}
            named, before = f"resp_{number}", {} if number == 2 else {"msg_resp_2": "7"}
            history = await store.conversations.items("conv_1", "ann")
            assert history is not None
            assert (history.items[0], history.tokens, history.results) == (ITEMS[0], {"msg_1": (3,)}, before)
            position = len(history.items)
            await store.conversations.lock("conv_1", "ann", named, position)
            newer = replace(conversation_response(named), origin=Origin("ann", position), results={f"msg_{named}": "7"})
            await store_response(store, newer)
            assert await store.get(named, "ann") == newer


@contextmanager
def next_release(demand: int) -> Iterator[None]:
    """Act as the next release, which adds a table, and needs ``demand`` of its statements to be known."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((sqlite_database, "SQLITE"), (postgres_database, "POSTGRES")):
            now: Schema = getattr(module, name)
            added = (*now.statements, "create table added (x text)")
            patch.setattr(module, name, Schema(added, len(now.statements) + demand))
        yield


async def test_table_of_the_next_release_is_added_once(store_at: str) -> None:
    """Servers of both releases open the store in turn, as during a rolling upgrade."""
    async with open_store(store_at) as store:
        await store_response(store, OLD)
        for _ in range(2):
            with next_release(0):
                async with open_store(store_at) as newer:
                    assert await newer.get("resp_1", "") == await store.get("resp_1", "")
            async with open_store(store_at) as older:
                assert await older.get("resp_1", "") == await store.get("resp_1", "")


async def test_next_release_may_end_the_use_by_this_one(store_at: str) -> None:
    with next_release(1):
        async with open_store(store_at):
            pass
    for _ in range(2):
        with pytest.raises(StoreFailed, match="and this penstock knows versions up to"):
            async with open_store(store_at):
                pass
        with next_release(0):
            async with open_store(store_at):
                pass
