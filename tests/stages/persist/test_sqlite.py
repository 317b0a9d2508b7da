from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from pipeline.errors import StoreFailed
from pipeline.protocol.items import AdditionalTools, CustomToolCallOutput, FunctionCallOutput
from pipeline.protocol.response import ErrorDetails, IncompleteDetails, InputTokensDetails, OutputTokensDetails, Usage
from stages.persist.sqlite import SqliteStore
from stages.persist.store import StoredResponse
from tests.stages.persist.samples import ITEMS, stored

ROOT = Path(__file__).parents[3]


async def test_every_item_comes_back_as_it_was(store: SqliteStore) -> None:
    """Input and output items of every type survive the store, fields left out included."""
    output = tuple(
        item for item in ITEMS if not isinstance(item, FunctionCallOutput | CustomToolCallOutput | AdditionalTools)
    )
    put = stored("resp_1", *ITEMS, output=output)
    await store.put(put)
    assert await store.get("resp_1") == put


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "incomplete", "incomplete_details": IncompleteDetails("max_output_tokens"), "completed_at": None},
        {"status": "failed", "error": ErrorDetails("server_error", "It broke."), "output": ()},
        {"usage": Usage(7, InputTokensDetails(3), 5, OutputTokensDetails(2), 12)},
        {"tool_choice": {"type": "function", "name": "weather"}, "previous_response_id": "resp_0", "metadata": {}},
    ],
)
async def test_every_end_of_a_response_comes_back_as_it_was(store: SqliteStore, fields: dict[str, object]) -> None:
    """A response is kept whole, whatever its state."""
    put = stored("resp_1", **fields)
    await store.put(put)
    assert await store.get("resp_1") == put


async def test_an_unknown_id_is_none(store: SqliteStore) -> None:
    """What was never put is not an error."""
    assert await store.get("resp_none") is None
    assert await store.chain("resp_none") == ()


async def test_a_second_put_replaces_the_first(store: SqliteStore) -> None:
    """There is one response per id: the latest."""
    await store.put(stored("resp_1", status="in_progress"))
    await store.put(stored("resp_1", ITEMS[0], status="completed"))
    assert await store.get("resp_1") == stored("resp_1", ITEMS[0], status="completed")


async def test_a_chain_is_told_oldest_first(store: SqliteStore) -> None:
    """The chain of a response is its ancestors in order, itself last, and no others."""
    first, second = stored("resp_b"), stored("resp_c", previous_response_id="resp_b")
    third = stored("resp_a", ITEMS[0], previous_response_id="resp_c")
    aside = stored("resp_d", previous_response_id="resp_b")
    for put in (third, aside, first, second):
        await store.put(put)
    assert await store.chain("resp_a") == (first, second, third)
    assert await store.chain("resp_b") == (first,)


async def test_a_chain_begins_behind_a_missing_ancestor(store: SqliteStore) -> None:
    """What an ancestor that is gone had continued is out of reach."""
    await store.put(stored("resp_1"))
    await store.put(stored("resp_3", previous_response_id="resp_2"))
    await store.put(stored("resp_4", previous_response_id="resp_3"))
    assert [each.response.id for each in await store.chain("resp_4")] == ["resp_3", "resp_4"]


async def test_a_file_is_read_again_after_a_restart(path: Path) -> None:
    """What one store put, the next one on the same file finds."""
    for response_id in ("resp_1", "resp_2"):
        store = SqliteStore(path)
        await store.put(stored(response_id))
        await store.close()
    store = SqliteStore(path)
    assert await store.get("resp_1") == stored("resp_1")
    assert await store.get("resp_2") == stored("resp_2")
    await store.close()


async def test_two_processes_share_a_file(store: SqliteStore, path: Path) -> None:
    """A second store on the same file sees what the first has put, and the other way round."""
    other = SqliteStore(path)
    await asyncio.gather(*(each.put(stored(f"resp_{n}")) for n, each in enumerate([store, other] * 20)))
    assert await other.get("resp_0") == stored("resp_0")
    assert await store.get("resp_39") == stored("resp_39")
    await other.close()


PUT_AND_WAIT = """
import asyncio, sys
from stages.persist.sqlite import SqliteStore
from stages.persist.store import StoredResponse
from tests.stages.persist.samples import ITEMS, stored

async def main():
    store = SqliteStore(sys.argv[1])
    await store.put(stored("resp_killed"))
    print("put", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_put_that_returned_survives_a_kill(path: Path) -> None:
    """The row is on disk when put returns: SIGKILL right behind it loses nothing."""
    command = [sys.executable, "-c", PUT_AND_WAIT, str(path)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"put\n"
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    store = SqliteStore(path)
    assert await store.get("resp_killed") == stored("resp_killed")
    await store.close()


async def test_puts_that_wait_are_committed_together(store: SqliteStore) -> None:
    """Two hundred concurrent puts are a handful of transactions."""
    statements: list[str] = []
    store._write_connection.set_trace_callback(statements.append)
    await asyncio.gather(*(store.put(stored(f"resp_{n}")) for n in range(200)))
    assert 1 <= statements.count("commit") < 10
    assert await store.get("resp_199") == stored("resp_199")


async def test_a_bad_put_fails_alone(store: SqliteStore) -> None:
    """A row that SQLite or JSON cannot take leaves its neighbours in the same transaction alone."""
    rows = [stored("resp_1"), stored("resp_2", created_at=2**63), stored("resp_3", model="\ud800"), stored("resp_4")]
    outcomes = await asyncio.gather(*map(store.put, rows), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), StoreFailed, StoreFailed, type(None)]
    assert isinstance(outcomes[1], StoreFailed)
    assert isinstance(outcomes[1].__cause__, OverflowError)
    found = [await store.get(row.response.id) for row in rows]
    assert found == [rows[0], None, None, rows[3]]


async def test_a_full_disk_fails_the_puts_and_not_the_store(store: SqliteStore) -> None:
    """Without room a put fails by name; what was stored stays readable, and with room the store goes on."""
    await store.put(stored("resp_1"))
    (pages,) = store._write_connection.execute("pragma page_count").fetchone()
    store._write_connection.execute(f"pragma max_page_count = {pages}")
    with pytest.raises(StoreFailed, match="could not be stored") as failure:
        await store.put(stored("resp_2", instructions="x" * 100_000))
    assert isinstance(failure.value.__cause__, sqlite3.OperationalError)
    assert await store.get("resp_1") == stored("resp_1")
    store._write_connection.execute("pragma max_page_count = 1000000")
    await store.put(stored("resp_2"))
    assert await store.get("resp_2") == stored("resp_2")


async def test_a_file_that_stays_locked_fails_the_put(store: SqliteStore, path: Path) -> None:
    """Another process that never lets go of the file costs one put its patience, not the server its life."""
    store._write_connection.execute("pragma busy_timeout = 20")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin immediate")
        with pytest.raises(StoreFailed):
            await store.put(stored("resp_1"))
    await store.put(stored("resp_1"))
    assert await store.get("resp_1") == stored("resp_1")


async def test_a_damaged_row_is_a_store_failure(store: SqliteStore) -> None:
    """What can no longer be understood is an error of the store, by name."""
    await store.put(stored("resp_1"))
    store._write_connection.execute("update responses set response = '{}'")
    with pytest.raises(StoreFailed, match="could not be read"):
        await store.get("resp_1")


def test_a_newer_schema_is_refused(path: Path) -> None:
    """A file that a newer penstock has written is left as it is."""
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma user_version = 99")
    with pytest.raises(StoreFailed, match="schema version 99"):
        SqliteStore(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("pragma user_version").fetchone() == (99,)
        assert connection.execute("select count(*) from sqlite_master").fetchone() == (0,)


def test_what_is_no_database_is_refused(path: Path) -> None:
    """A foreign file is named and left as it is."""
    path.parent.mkdir()
    path.write_text("Dear diary, " * 100)
    with pytest.raises(StoreFailed, match=r"responses\.sqlite3"):
        SqliteStore(path)
    assert path.read_text().startswith("Dear diary")


def test_a_place_without_room_for_a_file_is_refused(tmp_path: Path) -> None:
    """A path that cannot be made fails when the store is built, not at the first put."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailed, match="cannot be opened"):
        SqliteStore(tmp_path / "file" / "responses.sqlite3")


async def test_a_closed_store_fails_by_name(path: Path) -> None:
    """After close, reads and puts are store failures; closing again is harmless."""
    store = SqliteStore(path)
    await store.close()
    await store.close()
    with pytest.raises(StoreFailed, match="closed"):
        await store.put(stored())
    with pytest.raises(StoreFailed, match="closed"):
        await store.get("resp_1")
    with pytest.raises(StoreFailed, match="closed"):
        await store.chain("resp_1")
    with pytest.raises(StoreFailed, match="closed"):
        await store.items(["msg_1"])
    with pytest.raises(StoreFailed, match="closed"):
        await store.delete("resp_1")


async def test_close_finishes_the_puts_that_wait(path: Path) -> None:
    """A put that was accepted is carried out before the file is closed."""
    store = SqliteStore(path)
    puts = [asyncio.ensure_future(store.put(stored(f"resp_{n}"))) for n in range(50)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*puts)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("select count(*) from responses").fetchone() == (50,)


async def test_a_cancelled_put_harms_nobody(store: SqliteStore) -> None:
    """Callers may leave while they wait: their puts are carried out, and so are their neighbours'."""
    puts = [asyncio.ensure_future(store.put(stored(f"resp_{n}"))) for n in range(20)]
    await asyncio.sleep(0)
    for put in puts[::2]:
        put.cancel()
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes] == [True, False] * 10
    await store.put(stored("resp_last"))
    assert await store.get("resp_0") == stored("resp_0")
    assert await store.get("resp_1") == stored("resp_1")


async def test_a_bug_while_storing_stops_no_later_put(store: SqliteStore) -> None:
    """An error that nobody foresaw fails its own group; puts that came meanwhile are served."""
    broken = asyncio.ensure_future(store.put(cast("StoredResponse", None)))
    await asyncio.sleep(0)  # the flush takes its group
    await asyncio.sleep(0)
    later = asyncio.ensure_future(store.put(stored("resp_2")))
    async with asyncio.timeout(5):
        with pytest.raises(StoreFailed):
            await broken
        await later
    assert await store.get("resp_2") == stored("resp_2")


async def test_the_loop_runs_while_the_store_waits(store: SqliteStore, path: Path) -> None:
    """A put that waits for a locked file holds up neither the loop nor a reader."""
    await store.put(stored("resp_1"))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin immediate")
        put = asyncio.ensure_future(store.put(stored("resp_2")))
        assert await store.get("resp_1") == stored("resp_1")
        assert not put.done()
        other.execute("rollback")
    await put
    assert await store.get("resp_2") == stored("resp_2")
