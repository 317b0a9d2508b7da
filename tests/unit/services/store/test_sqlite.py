"""SQLite alone: its file, its locks, and older schemas."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import threading
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from penstock.pipeline.errors import StoreFailed, StreamExpired
from penstock.services.store.database import LONG
from penstock.services.store.migrations import SQLITE
from penstock.services.store.sqlite import SqliteDatabase
from penstock.services.store.store import Store, StoredResponse
from tests.support.stored_responses import ITEMS, begun_response, store_response, stored_response
from tests.support.stores import open_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a new store, in a folder that does not exist yet."""
    return tmp_path / "folder" / "store.sqlite3"


def first_file(path: Path, version: int, *responses: StoredResponse) -> None:
    """Write a file in the schema of an older ``version``, from before owners and events existed."""
    path.parent.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in SQLITE.statements[:version]:
            connection.execute(statement)
        for each in responses:
            response = each.response
            row = (response.id, response.previous_response_id, response.created_at, response.status)
            texts = (_json(response), _json(each.input))
            connection.execute("insert into responses values (?, ?, ?, ?, ?, ?)", (*row, *texts))
        connection.execute(f"pragma user_version = {version}")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


@pytest.mark.parametrize("version", [1, 3, 6])
async def test_older_file_is_migrated(path: Path, version: int) -> None:
    older = (
        stored_response("resp_1", *ITEMS),
        stored_response("resp_2", ITEMS[0], previous_response_id="resp_1", status="failed"),
    )
    first_file(path, version, *older)
    async with open_store(str(path)) as store:
        assert await store.chain("resp_2", "") == older
        assert await store.get("resp_1", "ann") is None
        assert len(await store.items([item.id for item in ITEMS], "")) == len(ITEMS)
        assert await store.orphans() == ()
        with pytest.raises(StreamExpired):
            await store.blocks("resp_1")
        await store_response(store, stored_response("resp_3", previous_response_id="resp_2"))
        assert await store.delete("resp_1", "")
        assert set(await store.items([item.id for item in ITEMS], "")) == {"msg_1"}
    async with open_store(str(path)) as store:
        assert [each.response.id for each in await store.chain("resp_3", "")] == ["resp_2", "resp_3"]


async def test_locked_file_is_waited_for(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("begin immediate")
        asyncio.get_running_loop().call_later(0.2, other.execute, "rollback")
        async with open_store(str(path)) as store:
            await store_response(store, stored_response("resp_1"))


async def test_newer_schema_is_refused(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma user_version = 99")
    with pytest.raises(StoreFailed, match="schema version 99, and this penstock knows versions up to"):
        await Store(SqliteDatabase(path)).open()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("pragma user_version").fetchone() == (99,)
        assert connection.execute("select count(*) from sqlite_master").fetchone() == (0,)


def test_foreign_file_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("Dear diary, " * 100)
    with pytest.raises(StoreFailed, match=r"store\.sqlite3"):
        asyncio.run(Store(SqliteDatabase(path)).open())
    assert path.read_text().startswith("Dear diary")


async def test_impossible_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailed, match="cannot be opened"):
        await Store(SqliteDatabase(tmp_path / "file" / "store.sqlite3")).open()


async def test_full_disk_loses_nothing(path: Path) -> None:
    database = SqliteDatabase(path)
    store = Store(database)
    await store.open()
    await store_response(store, stored_response("resp_1"))
    (pages,) = database._writing.execute("pragma page_count").fetchone()
    database._writing.execute(f"pragma max_page_count = {pages}")
    big = stored_response("resp_2", instructions="x" * 100_000)
    store.begin(begun_response(big))
    ended = store.end(big, None)
    with pytest.raises(StoreFailed, match="cannot be reached") as failure:
        await store.delete("resp_none", "")
    assert str(failure.value.__cause__) == "OperationalError: SQLITE_FULL"
    assert store.is_degraded
    assert store.backlog > 200_000
    assert await store.get("resp_1", "") == stored_response("resp_1")
    database._writing.execute("pragma max_page_count = 1000000")
    await ended
    assert not store.is_degraded
    assert await store.get("resp_2", "") == big
    await store.close()


async def test_locked_file_loses_nothing(path: Path) -> None:
    database = SqliteDatabase(path)
    store = Store(database)
    await store.open()
    await store_response(store, stored_response("resp_1"))
    database._writing.execute("pragma busy_timeout = 20")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin immediate")
        store.begin(begun_response(stored_response("resp_2")))
        with pytest.raises(StoreFailed):
            await store.conversations.delete("conv_1", "")
        assert store.is_degraded
        assert await store.get("resp_1", "") == stored_response("resp_1")
        other.execute("rollback")
    await store.end(stored_response("resp_2"), None)
    assert await store.get("resp_2", "") == stored_response("resp_2")
    await store.close()


async def test_loop_runs_while_the_store_waits(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store_response(store, stored_response("resp_1"))
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("begin immediate")
            keeping = asyncio.ensure_future(store_response(store, stored_response("resp_2")))
            assert await store.get("resp_1", "") == stored_response("resp_1")
            assert not keeping.done()
            other.execute("rollback")
        await keeping


async def test_waiting_changes_are_committed_together(path: Path) -> None:
    database = SqliteDatabase(path)
    store = Store(database)
    await store.open()
    statements: list[str] = []
    database._writing.set_trace_callback(statements.append)
    await asyncio.gather(*(store_response(store, stored_response(f"resp_{n}")) for n in range(200)))
    assert 1 <= statements.count("commit") < 10
    await store.close()


async def test_deleted_response_frees_its_space(path: Path) -> None:
    async with open_store(str(path)) as store:
        empty = (await store.sweep(3600, 3600)).bytes
        await store_response(store, stored_response("resp_1", instructions="x" * 1_000_000))
        full = (await store.sweep(3600, 3600)).bytes
        assert full > empty + 900_000
        await store.delete("resp_1", "")
        assert (await store.sweep(3600, 3600)).bytes < empty + 50_000


def modes(folder: Path) -> dict[str, int]:
    """The permissions of a folder and of the files in it."""
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}


STORE_MODES = {"folder": 0o700} | dict.fromkeys(("store.sqlite3", "store.sqlite3-wal", "store.sqlite3-shm"), 0o600)


async def test_only_the_owner_can_read_a_new_store(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store_response(store, stored_response("resp_1"))
        assert modes(path.parent) == STORE_MODES


async def test_permissions_of_an_existing_store_are_mended(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store_response(store, stored_response("resp_1"))
    for made in (path.parent, path):
        made.chmod(0o755)
    async with open_store(str(path)) as store:
        await store_response(store, stored_response("resp_2"))
        assert modes(path.parent) == STORE_MODES


async def test_permissions_of_a_shared_folder_are_left(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o755)
    (path.parent / "notes.txt").touch()
    (path.parent / "notes.txt").chmod(0o644)
    async with open_store(str(path)):
        found = modes(path.parent)
    assert (found["folder"], found["notes.txt"], found["store.sqlite3"]) == (0o755, 0o644, 0o600)


async def test_no_query_waits_for_one_that_takes_long(path: Path) -> None:
    store = SqliteDatabase(path)
    await store.open()
    going = threading.Event()
    held = store._search_thread.submit(going.wait)
    long = asyncio.create_task(store.read(f"select 1 {LONG}"))
    assert await store.read("select 2") == [(2,)]
    assert not long.done()
    going.set()
    assert await long == [(1,)]
    assert held.result()
    await store.close()
