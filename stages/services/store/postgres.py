"""PostgreSQL: the store that many servers on many machines share.

One connection writes, because groups are committed one after the other; a small pool reads.  A connection that is lost
is made again at the next try.
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
from penstock.stages.services.store.database import Refused, Row, Statement, Unavailable, Unit, Value
from penstock.stages.services.store.schema import POSTGRES, newer
from penstock.stages.services.store.statements import bulks

_READERS = 4
"""How many queries run at once."""

_CONNECT_SECONDS = 5.0

_COMMAND_SECONDS = 10.0
"""After so long without an answer the connection counts as lost."""

_TRIES = 3
"""How often a group is tried again when it and another server's wait for each other's rows."""

_MIGRATING = 0x70656E73746F636B
"""The advisory lock of whoever brings the schema up to date."""

_SETTINGS: dict[str, Any] = {
    "timeout": _CONNECT_SECONDS,
    "command_timeout": _COMMAND_SECONDS,
    "server_settings": {"application_name": "penstock"},
}

_FOR_EVER = ("22", "23", "42", "54")
"""Classes of SQLSTATE that tell of the statement or its values: another try meets the same."""


class PostgresDatabase:
    """A `Database` on the server and in the database that ``url`` names."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._writing: Any = None
        self._readers: Any = None

    async def open(self) -> None:
        """Connect; raises `StoreFailed` where that cannot be, with nothing of the URL that is secret."""
        try:
            with _named_errors():
                await self._upgrade()
                self._readers = await asyncpg.create_pool(self._url, min_size=1, max_size=_READERS, **_SETTINGS)
        except (Unavailable, Refused) as exc:
            raise StoreFailed(f"The store {_place(self._url)} cannot be opened: {exc}.") from None
        finally:
            if self._readers is None:
                self._lose_connection()

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        """Carry out the units in one transaction."""
        try:
            with _named_errors():
                for _ in range(_TRIES):
                    with suppress(asyncpg.DeadlockDetectedError):
                        return await self._write(units)
                return await self._write(units)
        except Unavailable:
            self._lose_connection()
            raise

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        """The rows of a query; it is asked once more where its connection was just lost."""
        with _named_errors():
            try:
                return await self._fetch(sql, *arguments)
            except (asyncpg.PostgresConnectionError, asyncpg.AdminShutdownError):
                return await self._fetch(sql, *arguments)

    async def _fetch(self, sql: str, *arguments: Value) -> Sequence[Row]:
        async with self._readers.acquire(timeout=_CONNECT_SECONDS) as connection:
            rows: Sequence[Row] = await connection.fetch(sql, *arguments)
        return rows

    async def size(self) -> int:
        """Bytes of the database on the server's disk."""
        ((size,),) = await self.read("select pg_database_size(current_database())")
        return int(size)

    async def close(self) -> None:
        """Let go of all connections.  Closing twice is harmless."""
        self._lose_connection()
        if self._readers is not None:
            self._readers.terminate()

    async def _write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        counts: list[tuple[int, ...]] = []
        connection = await self._connected()
        async with connection.transaction():
            for counted, group in groupby(units, attrgetter("counted")):
                together = tuple(group)
                counts += await (_counted(connection, together) if counted else _in_bulk(connection, together))
        return counts

    async def _connected(self) -> Any:
        """The connection that writes, made again where it was lost."""
        if self._writing is None or self._writing.is_closed():
            self._writing = await asyncpg.connect(self._url, **_SETTINGS)
        return self._writing

    def _lose_connection(self) -> None:
        """Forget the connection that writes: nobody knows what became of its last words."""
        if self._writing is not None:
            self._writing.terminate()
            self._writing = None

    async def _upgrade(self) -> None:
        """Bring the database to today's schema, one server at a time."""
        connection = await self._connected()
        async with connection.transaction():
            await connection.execute(f"select pg_advisory_xact_lock({_MIGRATING})")
            await connection.execute("create table if not exists schema_version (version bigint not null)")
            version = await connection.fetchval("select max(version) from schema_version") or 0
            if version > len(POSTGRES):
                raise StoreFailed(newer(version, len(POSTGRES)))
            for statement in POSTGRES[version:]:
                await connection.execute(statement)
            await connection.execute("delete from schema_version")
            await connection.execute(f"insert into schema_version values ({len(POSTGRES)})")


async def _counted(connection: Any, units: Sequence[Unit]) -> list[tuple[int, ...]]:
    return [tuple([await _execute(connection, statement) for statement in unit.statements]) for unit in units]


async def _execute(connection: Any, statement: Statement) -> int:
    """How many rows a statement has changed: the last word of its tag, as in ``INSERT 0 1``."""
    tag: str = await connection.execute(statement.sql, *statement.arguments)
    return int(tag.rpartition(" ")[2])


async def _in_bulk(connection: Any, units: Sequence[Unit]) -> list[tuple[int, ...]]:
    for sql, arguments in bulks(units).items():
        await connection.executemany(sql, arguments)
    return [()] * len(units)


@contextmanager
def _named_errors() -> Iterator[None]:
    """Whatever goes wrong, as what it means for another try."""
    try:
        yield
    except asyncpg.PostgresError as exc:
        state = str(getattr(exc, "sqlstate", ""))
        raise (Refused if state.startswith(_FOR_EVER) else Unavailable)(str(exc)) from exc
    except ValueError as exc:
        raise Refused("what it was given cannot be understood") from exc
    except (asyncpg.InterfaceError, asyncpg.InternalClientError) as exc:  # or a connection died in the middle of a word
        raise Unavailable(str(exc)) from exc
    except OSError as exc:
        raise Unavailable(str(exc) or "it does not answer") from exc


def _place(url: str) -> str:
    """Where a URL leads, without what is secret in it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 5432
    except ValueError:
        return "in PostgreSQL"
    return f"{host}:{port}{parts.path}"
