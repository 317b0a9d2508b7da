"""Stores for tests, in every database there is.

A test that asks for `store_at` runs once for each: it gets what a server takes as its ``--store``, the path of a file
or the URL of an empty schema in PostgreSQL.  One that asks for `store` gets it open.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from stages.persist.database import Database
from stages.persist.postgres import PostgresDatabase
from stages.persist.sqlite import SqliteDatabase
from stages.persist.store import Store
from tests.support.postgres import Elsewhere, Postgres, any_server, empty_schema

PLACES = ("sqlite", "postgres")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres | Elsewhere]:
    """A PostgreSQL server, which comes up when the first test asks for it."""
    with any_server() as server:
        yield server


@pytest.fixture(params=PLACES)
async def store_at(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """Where an empty store is: a path, or a URL."""
    async with empty_store(request, request.param, tmp_path) as store_at:
        yield store_at


@pytest.fixture
async def store(store_at: str) -> AsyncIterator[Store]:
    """An open store."""
    async with opened(store_at) as store:
        yield store


@asynccontextmanager
async def empty_store(request: pytest.FixtureRequest, place: str, folder: Path) -> AsyncIterator[str]:
    """Where an empty store is, in that database, for the length of the block."""
    if place == "sqlite":
        yield str(folder / "folder" / "store.sqlite3")
    else:
        async with empty_schema(request.getfixturevalue("postgres")) as url:
            yield url


@asynccontextmanager
async def opened(store_at: str, stale: float = 15.0) -> AsyncIterator[Store]:
    """The store that is there, open; of several, each is a server of its own."""
    store = Store(database(store_at), stale)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def database(store_at: str) -> Database:
    """The database that is there, not yet open."""
    return PostgresDatabase(store_at) if store_at.startswith("postgresql:") else SqliteDatabase(store_at)


async def contents(store_at: str) -> str:
    """All that is in the store's files, or in the rows of its tables, as one text."""
    if not store_at.startswith("postgresql:"):
        return "".join(file.read_bytes().decode("latin-1") for file in Path(store_at).parent.iterdir())
    connection = await asyncpg.connect(store_at)
    try:
        tables = await connection.fetch("select tablename from pg_tables where schemaname = current_schema()")
        rows = [row for (table,) in tables for row in await connection.fetch(f"select * from {table}")]
    finally:
        await connection.close()
    return "".join(value.decode("latin-1") if isinstance(value, bytes) else str(value) for row in rows for value in row)
