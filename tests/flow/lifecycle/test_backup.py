"""Backup and restore, by the commands of `deploy/README.md`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.support.paths import ROOT
from tests.support.server_process import running_process
from tests.support.stores import programs_of_postgres, wait_until_stored

pytestmark = pytest.mark.io

PAGE = (ROOT / "deploy" / "README.md").read_text()
_, _, SECTION = PAGE.partition("## Backup and restore\n")
SQLITE, POSTGRES = (re.findall(r"```sh\n(.*?)```", part, re.DOTALL) for part in SECTION.split("\nPostgreSQL:\n")[:2])


SHORT = {"max_output_tokens": 16}
"""For a response that ends at once; any other is still running when a test ends."""


@asynccontextmanager
async def store_of_its_own(request: pytest.FixtureRequest, kind: str, folder: Path) -> AsyncIterator[str]:
    """Yield a SQLite file, or a database in PostgreSQL: its programs know no schemas in a URL."""
    if kind == "sqlite":
        yield str(folder / "store.sqlite3")
        return
    url: str = request.getfixturevalue("postgres").url
    connection = await asyncpg.connect(url)
    name = f"backup_{os.getpid()}"
    try:
        await connection.execute(f"create database {name}")
        yield urlsplit(url)._replace(path=f"/{name}").geturl()
        await connection.execute(f"drop database {name} with (force)")
    finally:
        await connection.close()


async def run_shell(command: str, store: str, backup: Path, *, status: int = 0) -> str:
    path = os.pathsep.join((str(programs_of_postgres()), os.environ["PATH"]))
    environment = os.environ | {"STORE": store, "BACKUP": str(backup), "PATH": path}
    done = await asyncio.to_thread(
        subprocess.run, ["bash", "-ec", command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stderr


@pytest.mark.parametrize(("kind", "commands"), [("sqlite", SQLITE), ("postgres", POSTGRES)], ids=["sqlite", "postgres"])
async def test_backup_of_a_running_server_restores_what_was_stored(
    kind: str, commands: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    save, restore = commands
    backup = tmp_path / "backup"
    async with (
        store_of_its_own(request, kind, tmp_path) as store,
        running_process(store, tmp_path, "long", "--drain-timeout", "0") as server,
    ):
        kept = await server.wait_for_end(await server.start_background(SHORT))
        stream = await server.replay(kept["id"])
        conversation = await server.create_conversation({"role": "user", "content": "Hello."})
        items = await server.conversation_items(conversation)
        running = await server.start_background()
        await wait_until_stored(store, running, 5)
        await run_shell(save, store, backup)
        assert (await server.cancel(running))[1]["status"] == "cancelled"
        later = await server.start_background()
        await server.kill(signal.SIGTERM)

        await run_shell(restore, store, backup)
        await server.start()
        assert await server.get_response(kept["id"]) == kept
        assert await server.replay(kept["id"]) == stream
        assert await server.conversation_items(conversation) == items
        assert (await server.wait_for_end(running))["status"] == "failed"
        assert (await server.get(f"/v1/responses/{later}"))[0] == 404
        status, continued = await server.post({**SHORT, "input": "Go on.", "previous_response_id": kept["id"]})
        assert (status, continued["status"]) == (200, "incomplete")


async def test_backup_of_sqlite_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    store, backup = tmp_path / "store.sqlite3", tmp_path / "backup"
    async with running_process(str(store), tmp_path):
        await run_shell(SQLITE[0], str(store), backup)
    assert backup.stat().st_mode & 0o077 == 0


async def test_mistyped_path_loses_nothing(tmp_path: Path) -> None:
    store, backup, nowhere = tmp_path / "my store#1.sqlite3", tmp_path / "backup", tmp_path / "typo"
    empty = tmp_path / "empty"
    empty.touch()
    async with running_process(str(store), tmp_path):
        pass
    before = store.read_bytes()
    assert "unable to open" in await run_shell(SQLITE[0], str(nowhere), backup, status=1)
    assert "no such table" in await run_shell(SQLITE[0], str(empty), backup, status=1)
    assert "STORE" in await run_shell(SQLITE[0], "", backup, status=1)
    for wrong in (nowhere, empty):
        await run_shell(SQLITE[1], str(store), wrong, status=1)
    assert store.read_bytes() == before
    assert not nowhere.exists()
    assert not backup.exists()
    assert "unable" not in await run_shell(SQLITE[0], str(store), backup)
    before = store.read_bytes()
    await run_shell(SQLITE[1], str(store), backup)
    assert (tmp_path / f"{store.name}.old").read_bytes() == before


async def test_damaged_backup_replaces_no_store(tmp_path: Path) -> None:
    store, backup, cut, other = (tmp_path / name for name in ("store.sqlite3", "backup", "cut", "other"))
    async with running_process(str(store), tmp_path):
        await run_shell(SQLITE[0], str(store), backup)
    before = store.read_bytes()
    whole = backup.read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    other.write_text("sk-of-somebody name=bob\n")
    for wrong in (cut, other):
        await run_shell(SQLITE[1], str(store), wrong, status=1)
        assert store.read_bytes() == before
    assert not (tmp_path / "store.sqlite3.new").exists()
    assert not (tmp_path / "store.sqlite3.old").exists()


async def test_backup_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    store, backup = tmp_path / "store.sqlite3", tmp_path / "backup"
    async with running_process(str(store), tmp_path):
        (tmp_path / "backup.part").write_bytes(b"of a backup that was interrupted")
        await run_shell(SQLITE[0], str(store), backup)
        assert "exists" in await run_shell(SQLITE[0], str(store), backup, status=1)
    assert not (tmp_path / "backup.part").exists()
    await run_shell(SQLITE[1], str(store), backup)
