"""Outages of the store: streams go on, `/health` reports it, and responses are stored afterwards."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.runs.event_log import Block
from penstock.services.store.database import Database
from penstock.services.store.postgres import PostgresDatabase
from penstock.services.store.sqlite import SqliteDatabase
from penstock.services.store.writer import LIMIT
from tests.support.api_clients import wait_until
from tests.support.event_streams import final, read_sse
from tests.support.server import ScriptedServer, running_server, script
from tests.support.stores import FaultyDatabase, PostgresServer, database_at, running_postgres

TALK = "<|channel|>final<|message|>" + "la " * 12_000 + "<|return|>"
CHUNKS = {"chunk_size": 200, "latency": 0.005}
"""Enough tokens at a time to fill a limited disk."""

HANGS = 120
"""Seconds to wait during an outage that never ends."""


class Outage(Protocol):
    @property
    def database(self) -> Database: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...


# Stalls: nothing fails, and no answer comes


@dataclass
class Stalled:
    """Writes are accepted and not answered."""

    database: FaultyDatabase

    def begin(self) -> None:
        self.database.stalls.clear()

    def end(self) -> None:
        self.database.stalls.set()


@dataclass
class Held:
    """Another process holds the file, for less time than the server waits for it."""

    path: Path
    database: SqliteDatabase = field(init=False)

    def __post_init__(self) -> None:
        self.database = SqliteDatabase(self.path)

    def begin(self) -> None:
        self._other = sqlite3.connect(self.path, isolation_level=None)
        self._other.execute("begin exclusive")

    def end(self) -> None:
        self._other.close()


# Failures


class Locked(Held):
    def begin(self) -> None:
        super().begin()
        self.database._writing.execute("pragma busy_timeout = 50")


class Removed(Held):
    """The file is removed, and later put back."""

    def begin(self) -> None:
        self.path.rename(self.path.with_suffix(".removed"))

    def end(self) -> None:
        self.path.with_suffix(".removed").rename(self.path)


class Replaced(Removed):
    """Another file has the name until the first is put back."""

    def begin(self) -> None:
        super().begin()
        self.path.write_bytes(self.path.with_suffix(".removed").read_bytes())


@dataclass
class Full:
    database: SqliteDatabase

    def begin(self) -> None:
        (pages,) = self.database._writing.execute("pragma page_count").fetchone()
        self.database._writing.execute(f"pragma max_page_count = {pages}")

    def end(self) -> None:
        self.database._writing.execute("pragma max_page_count = 1000000")


@dataclass
class Stopped:
    server: PostgresServer
    database: PostgresDatabase = field(init=False)

    def __post_init__(self) -> None:
        self.database = PostgresDatabase(self.server.url)

    def begin(self) -> None:
        self.server.stop()

    def end(self) -> None:
        self.server.start()


@dataclass
class Gone:
    database: FaultyDatabase

    def begin(self) -> None:
        self.database.is_down = True

    def end(self) -> None:
        self.database.is_down = False


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["locked", "full", "removed", "replaced", "stopped"])
def outage(request: pytest.FixtureRequest, tmp_path: Path) -> Outage:
    path = tmp_path / "store.sqlite3"
    if request.param == "stopped":
        return Stopped(request.getfixturevalue("own_postgres"))
    if request.param == "full":
        return Full(SqliteDatabase(path))
    return {"locked": Locked, "removed": Removed, "replaced": Replaced}[request.param](path)


# Helpers


@asynccontextmanager
async def talking(where: Database) -> AsyncGenerator[ScriptedServer, None]:
    engine = ScriptedEngine(script(TALK, **CHUNKS))
    async with running_server(engine, where, heartbeat=0.2, stale=60) as served:
        yield served


async def health(served: ScriptedServer, wanted: str) -> None:
    """Wait until the health of the server is this."""
    async with asyncio.timeout(HANGS):
        while (await served.get("/health"))[1]["status"] != wanted:
            await asyncio.sleep(0.02)


async def refused(served: ScriptedServer, **fields: Any) -> None:
    async with served.client.post(f"{served.url}/v1/responses", json={"input": "Hi", **fields}) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        error = (await answer.json())["error"]
        assert (error["type"], "store" in error["message"].lower()) == ("server_error", True)


async def streamed_through(served: ScriptedServer, outage: Outage) -> bytes:
    """Return a stream that begins before an outage and ends during it."""
    async with (
        asyncio.timeout(HANGS),
        served.client.post(f"{served.url}/v1/responses", json={"input": "Hi", "stream": True}) as answer,
    ):
        stream = await answer.content.readuntil(b"\n\n")
        outage.begin()
        stream += await answer.content.read()
    assert final(read_sse(stream)).status == "completed"
    return stream


async def is_stored(served: ScriptedServer, stream: bytes) -> None:
    """Check that the store has a response, as the client of its first stream saw it."""
    await health(served, "ok")
    await wait_until(lambda: not len(served.scheduler.runs) and not served.store.backlog)
    response = final(read_sse(stream))
    assert await served.replay(response.id) == stream
    stored = await served.store.get(response.id, "")
    assert stored is not None
    assert stored.response == response


async def test_stalled_store_delays_no_stream(store_at: str) -> None:
    await held_up_by(Stalled(FaultyDatabase(database_at(store_at))))


async def test_locked_file_delays_no_stream(tmp_path: Path) -> None:
    await held_up_by(Held(tmp_path / "store.sqlite3"))


async def held_up_by(stall: Outage) -> None:
    async with talking(stall.database) as served:
        stream = await streamed_through(served, stall)
        await health(served, "degraded")
        assert await served.replay(final(read_sse(stream)).id) == stream
        stall.end()
        await is_stored(served, stream)


async def test_outage_harms_no_stream(outage: Outage) -> None:
    async with talking(outage.database) as served:
        before = await served.wait_for_end(await served.start_background())
        kept = (await served.store.sweep(3600, 3600)).responses
        stream = await streamed_through(served, outage)
        await health(served, "degraded")
        response_id = final(read_sse(stream)).id
        await refused(served, background=True)
        if isinstance(outage, Stopped):  # the others can still be read
            await refused(served, previous_response_id=before["id"])
        if isinstance(outage, Locked):  # one is enough, because the test waits for it
            await refused(served, previous_response_id=response_id)
        assert await served.replay(response_id) == stream
        outage.end()
        await is_stored(served, stream)
        assert (await served.store.sweep(3600, 3600)).responses == kept + 1
        going_on = await served.start_background({"previous_response_id": response_id})
        assert (await served.wait_for_end(going_on))["status"] == "completed"


@pytest.mark.parametrize("outage", ["locked", "removed", "stopped"], indirect=True)
async def test_outage_leaves_a_line_at_its_start_and_its_end(outage: Outage, caplog: pytest.LogCaptureFixture) -> None:
    """Refused requests have lines of their own; a driver that connects again and again must not fill the log."""
    async with talking(outage.database) as served:
        before = await served.wait_for_end(await served.start_background())
        outage.begin()
        await health(served, "degraded")
        for _ in range(3):
            await refused(served, background=True)
            await served.get(f"/v1/responses/{before['id']}")
        outage.end()
        await health(served, "ok")
    notable = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [record for record in notable if record.exc_info]
    own = [record.msg for record in notable if not record.name.startswith("penstock.api.http")]
    assert own == [
        "the store cannot be written, and changes wait in memory: %s",
        "the store is back after %.1f s",
    ]


async def test_responses_lost_in_an_outage_are_logged(store_at: str, caplog: pytest.LogCaptureFixture) -> None:
    faulty = FaultyDatabase(database_at(store_at))
    async with asyncio.timeout(2 * HANGS), talking(faulty) as served:
        stream = await streamed_through(served, Gone(faulty))
    with caplog.at_level(logging.ERROR):
        assert f"never stored: {final(read_sse(stream)).id}" in caplog.text


async def test_backlog_of_the_store_is_bounded(tmp_path: Path) -> None:
    faulty = FaultyDatabase(SqliteDatabase(tmp_path / "store.sqlite3"))
    async with talking(faulty) as served:
        with faulty.stalled():
            served.store.append("resp_huge", Block(0, 1, bytes(LIMIT)))
            await refused(served)
            await refused(served, stream=True)
            assert (await served.post({"input": "Hi", "store": False}))[1]["status"] == "completed"
        await wait_until(lambda: not served.store.backlog)
        assert (await served.post({"input": "Hi"}))[0] == 200


async def test_missing_store_ends_the_start_in_one_line() -> None:
    store = "postgresql://me:secret@127.0.0.1:1/penstock"
    command = (sys.executable, "-m", "penstock.api.cli", "serve", "tiny", "--port", "0", "--store", store)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 1
    (line,) = errors.decode().splitlines()
    assert line.startswith("penstock: The store 127.0.0.1:1/penstock cannot be opened:")
    assert "secret" not in line
