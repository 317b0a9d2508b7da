"""Databases of another version: older ones are migrated when they are opened, newer ones are used if they can be."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from hashlib import sha256
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
from penstock.services.store.migrations import POSTGRES, SQLITE, Schema, flat
from penstock.services.store.parts import tables_of_parts
from penstock.services.store.store import Store
from tests.support.stored_responses import ITEMS, conversation_response, store_response, stored_response
from tests.support.stores import empty_store, open_store

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
            patch.setattr(module, name, dataclasses.replace(now, statements=added, usable_from=len(added) - 1 + demand))
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


# Parts, whose statements stood in the first list

SCHEMAS = {"sqlite": SQLITE, "postgres": POSTGRES}

WHOLE = {
    "sqlite": (71, "b64e9a149a797e9b5be274cd9306b196d01332f97123a5c6afc4020745352bc8"),
    "postgres": (56, "eb5c268cb26179a5bb955ad951735aaa111eedf6629fdadcd7fbf56d2829385d"),
}
"""The number of statements before those of the parts left the list, and the SHA-256 of all with single spaces."""

OF_0_2 = {"sqlite": 40, "postgres": 27}
"""The number of schema statements of release 0.2.0."""

PARTS = {
    "batches": 9,
    "containers": 2,
    "files": 8,
    "ledger": 2,
    "signed_in": 2,
    "stored_chats": 3,
    "uploads": 2,
    "vector_stores": 15,
}


def before_parts(schema: Schema) -> list[str]:
    """Return the first list as it was, with the statements of the parts in their places.

    What a part has appended since follows in no list but its own.
    """
    parts = {f"-- {name}": tables for name, tables in tables_of_parts().items()}
    left = {mark: iter(flat(tables, schema.own)) for mark, tables in parts.items() if mark in schema.statements}
    return [next(left[statement]) if statement in left else statement for statement in schema.statements]


async def read_schema(store: Store, database: str) -> list[str]:
    """Return the tables and indexes of a database, and how much of each part it has executed."""
    queries = {
        "sqlite": "select type, name, sql from sqlite_master where sql is not null",
        "postgres": """
            select table_name, column_name, data_type from information_schema.columns
            where table_schema = current_schema()
            union select 'index', indexname, indexdef from pg_indexes where schemaname = current_schema()
        """,
    }
    read = [*await store.context.read(queries[database]), *await store.context.read("select * from schema_parts")]
    schema = (await store.context.read("select current_schema()"))[0][0] if database == "postgres" else "main"
    return sorted(" ".join(map(str, row)).replace(f"{schema}.", "") for row in read)


async def leave_before_parts(store_at: str, executed: int) -> None:
    """Create a database that has executed the first ``executed`` statements of list 0, before parts were known."""
    if store_at.startswith("postgresql:"):
        connection = await asyncpg.connect(store_at)
        for statement in before_parts(POSTGRES)[:executed]:
            await connection.execute(statement)
        await connection.execute("create table schema_version (version bigint not null)")
        await connection.execute(f"insert into schema_version values ({POSTGRES.usable_from})")
        await connection.execute("create table schema_statements (executed bigint not null)")
        await connection.execute(f"insert into schema_statements values ({executed})")
        await connection.close()
        return
    Path(store_at).parent.mkdir(exist_ok=True)
    with closing(sqlite3.connect(store_at, isolation_level=None)) as file:
        for statement in before_parts(SQLITE)[:executed]:
            file.execute(statement)
        file.execute(f"pragma user_version = {SQLITE.usable_from}")
        file.execute("create table schema_statements (executed bigint not null)")
        file.execute(f"insert into schema_statements values ({executed})")


@pytest.mark.parametrize("database", SCHEMAS)
def test_no_statement_of_the_first_list_is_changed_or_moved(database: str) -> None:
    count, digest = WHOLE[database]
    whole = (" ".join(statement.split()) for statement in before_parts(SCHEMAS[database])[:count])
    assert sha256("\0".join(whole).encode()).hexdigest() == digest


async def test_database_of_any_commit_is_upgraded(tmp_path: Path) -> None:
    async with open_store(str(tmp_path / "new" / "store.sqlite3")) as store:
        fresh = await read_schema(store, "sqlite")
    for executed in range(OF_0_2["sqlite"], len(SQLITE.statements) + 1):
        place = str(tmp_path / str(executed) / "store.sqlite3")
        await leave_before_parts(place, executed)
        for _ in range(2):
            async with open_store(place) as store:
                assert await read_schema(store, "sqlite") == fresh, executed


@pytest.mark.parametrize("more", [0, 1, 4, 8, 12, 21, 25, 29])
async def test_database_of_a_commit_is_upgraded(store_at: str, more: int, request: pytest.FixtureRequest) -> None:
    database = "postgres" if store_at.startswith("postgresql:") else "sqlite"
    await leave_before_parts(store_at, OF_0_2[database] + more)
    async with open_store(store_at) as store:
        upgraded = await read_schema(store, database)
        assert dict(await store.context.read("select name, executed from schema_parts")) == PARTS  # type: ignore[arg-type]  # rows of two
        async with empty_store(request, database, Path(store_at).parent / "fresh") as fresh_at:  # noqa: SIM117
            async with open_store(fresh_at) as fresh:
                assert upgraded == await read_schema(fresh, database)


async def test_part_may_be_installed_later(store_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for module in (sqlite_database, postgres_database):
            patch.setattr(module, "tables_of_parts", dict)
        patch.setattr("penstock.services.store.store.installed_parts", lambda: ())
        for _ in range(2):
            async with open_store(store_at) as store:
                await store_response(store, OLD)
                await store.recover_parts()
                assert (await store.sweep(1e9, 1e9)).responses == 1
                assert await store.bytes_of("") > 0
                assert not await store.has_file("file-1", "")
                with pytest.raises(StoreFailed):
                    await store.context.read("select 1 from files")
                assert set(await store.context.read("select executed from schema_parts")) == {(0,)}
    for _ in range(2):
        async with open_store(store_at) as store:
            assert dict(await store.context.read("select name, executed from schema_parts")) == PARTS  # type: ignore[arg-type]  # rows of two
            assert await store.context.read("select 1 from files") == []
