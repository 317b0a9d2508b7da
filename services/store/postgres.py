"""PostgreSQL: a store shared by many servers on many machines.

One connection writes, because groups are committed one after another; a small pool reads, and another one searches.  A
lost connection is replaced at the next attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

import asyncpg

from penstock.pipeline.errors import StoreFailed
from penstock.pipeline.foreign_errors import named_error
from penstock.services.store.database import (
    DatabaseRefused,
    DatabaseUnavailable,
    Row,
    Statement,
    Unit,
    Value,
    takes_long,
)
from penstock.services.store.migrations import EXECUTED, EXECUTED_OF_PARTS, EXECUTED_TABLES, POSTGRES
from penstock.services.store.parts import tables_of_parts
from penstock.services.store.statements import bulks

_READERS = 4
"""Maximum number of concurrent queries."""

_CONNECT_SECONDS = 5.0

_COMMAND_SECONDS = 10.0
"""Seconds without an answer after which a connection counts as lost."""

_END_STANDING = f"set idle_in_transaction_session_timeout = '{_COMMAND_SECONDS:.0f}s'"
"""Lets PostgreSQL end the transaction of a server that stands still, as others wait for the rows that it holds."""

_TRIES = 3
"""Number of retries of a group after a deadlock with another server."""

_MIGRATING = 0x70656E73746F636B
"""The advisory lock held while the schema is upgraded."""

_SETTINGS: dict[str, Any] = {
    "timeout": _CONNECT_SECONDS,
    "command_timeout": _COMMAND_SECONDS,
    "server_settings": {"application_name": "penstock"},
}

_SEARCH_SETTINGS: dict[str, Any] = {
    **_SETTINGS,
    "server_settings": {"application_name": "penstock search", "enable_seqscan": "off", "jit": "off"},
}
"""For frequent terms, PostgreSQL would read all chunks instead of the index, and take a hundred times as long."""

_SEARCHERS = 2
"""Maximum number of concurrent searches."""

_FOR_EVER = ("22", "23", "42", "54")
"""SQLSTATE classes of errors in the statement or its values: another attempt would fail again."""


_PROBLEMS = {
    "25": "it is in a read-only transaction, as those of a standby are",
    "28": "its user does not exist there, or the server refuses it or its password",
    "3D": "its database does not exist there",
    "53": "the server has no room left",
}
"""Words for SQLSTATE classes that an operator can mend; PostgreSQL's own may quote the values of a statement."""


class PostgresDatabase:
    """A `Database` in PostgreSQL, at ``url``."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._writing: Any = None
        self._readers: Any = None
        self._searchers: Any = None

    async def open(self) -> None:
        try:
            with _named_errors():
                await self._upgrade()
                self._readers = await asyncpg.create_pool(self._url, min_size=0, max_size=_READERS, **_SETTINGS)
                self._searchers = await asyncpg.create_pool(
                    self._url, min_size=0, max_size=_SEARCHERS, **_SEARCH_SETTINGS
                )
        except (DatabaseUnavailable, DatabaseRefused) as exc:
            raise StoreFailed(f"The store {_place(self._url)} cannot be opened: {exc}.") from None
        finally:
            if self._readers is None:
                self._lose_connection()

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        """Execute the units in one transaction, again after a deadlock."""
        try:
            with _named_errors():
                for _ in range(_TRIES):
                    with suppress(asyncpg.DeadlockDetectedError):
                        return await self._write(units)
                return await self._write(units)
        except DatabaseUnavailable:
            self._lose_connection()
            raise

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        """Return the rows of a query, retrying once if the connection is lost."""
        with _named_errors():
            try:
                return await self._fetch(sql, *arguments)
            except (asyncpg.PostgresConnectionError, asyncpg.AdminShutdownError):  # PostgreSQL may have started again
                return await self._fetch(sql, *arguments)

    async def _fetch(self, sql: str, *arguments: Value) -> Sequence[Row]:
        pool = self._searchers if takes_long(sql) else self._readers
        async with pool.acquire(timeout=_CONNECT_SECONDS) as connection:
            rows: Sequence[Row] = await connection.fetch(sql, *arguments)
        return rows

    async def size(self) -> int:
        ((size,),) = await self.read("select pg_database_size(current_database())")
        return int(size)

    async def close(self) -> None:
        self._lose_connection()
        for pool in (self._readers, self._searchers):
            if pool is not None:
                pool.terminate()

    async def _write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        counts: list[tuple[int, ...]] = []
        connection = await self._connected()
        async with connection.transaction():
            for counted, group in groupby(units, attrgetter("counted")):
                merged = tuple(group)
                counts += await (_counted(connection, merged) if counted else _in_bulk(connection, merged))
        return counts

    async def _connected(self) -> Any:
        if self._writing is None or self._writing.is_closed():
            self._writing = await asyncpg.connect(self._url, **_SETTINGS)
            await self._writing.execute(_END_STANDING)
        return self._writing

    def _lose_connection(self) -> None:
        """Drop the connection for writes: after an error the outcome of its last transaction is unknown."""
        if self._writing is not None:
            self._writing.terminate()
            self._writing = None

    async def _upgrade(self) -> None:
        """Upgrade the database to the current schema, one server at a time."""
        connection = await self._connected()
        async with connection.transaction():
            await connection.execute(f"select pg_advisory_xact_lock({_MIGRATING})")
            await connection.execute("create table if not exists schema_version (version bigint not null)")
            for table in EXECUTED_TABLES:
                await connection.execute(table)
            version = await connection.fetchval("select max(version) from schema_version") or 0
            executed, of_parts = await connection.fetchval(EXECUTED), await connection.fetch(EXECUTED_OF_PARTS)
            statements, usable_from = POSTGRES.upgrade(version, executed, dict(of_parts), tables_of_parts())
            for statement in statements:
                await connection.execute(statement)
            await connection.execute("delete from schema_version")
            await connection.execute(f"insert into schema_version values ({usable_from})")


async def _counted(connection: Any, units: Sequence[Unit]) -> list[tuple[int, ...]]:
    return [tuple(await _changed(connection, unit)) for unit in units]


async def _changed(connection: Any, unit: Unit) -> list[int]:
    counts: list[int] = []
    for statement in unit.statements:
        counts.append(await _execute(connection, statement))
        if unit.fenced and not counts[0]:
            break
    return counts


async def _execute(connection: Any, statement: Statement) -> int:
    """Return the number of rows that a statement changed: the last word of its tag, as in ``INSERT 0 1``."""
    tag: str = await connection.execute(statement.sql, *statement.arguments)
    return int(tag.rpartition(" ")[2])


async def _in_bulk(connection: Any, units: Sequence[Unit]) -> list[tuple[int, ...]]:
    for sql, arguments in bulks(units).items():
        await connection.executemany(sql, arguments)
    return [()] * len(units)


@contextmanager
def _named_errors() -> Iterator[None]:
    """Convert the driver's errors: `DatabaseRefused` if another attempt would fail too, else `DatabaseUnavailable`."""
    try:
        yield
    except asyncpg.PostgresError as exc:
        state: str = getattr(exc, "sqlstate", None) or ""
        problem = f"{_PROBLEMS[state[:2]]} ({named_error(exc)})" if state[:2] in _PROBLEMS else named_error(exc)
        raise (DatabaseRefused if state.startswith(_FOR_EVER) else DatabaseUnavailable)(problem) from exc
    except ValueError as exc:
        raise DatabaseRefused("what it was given cannot be understood") from exc
    except (asyncpg.InterfaceError, asyncpg.InternalClientError) as exc:  # also a connection lost mid-message
        raise DatabaseUnavailable(named_error(exc)) from exc
    except OSError as exc:
        raise DatabaseUnavailable(named_error(exc)) from exc


def _place(url: str) -> str:
    """Return the host, port and database of a URL, without its secrets."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 5432
    except ValueError:  # a bracket that stays open, or a port that is no number
        return "in PostgreSQL"
    return f"{host}:{port}{parts.path}"
