"""Responses in one SQLite file: durable, with no service to run, and shared by the processes of one machine.

All writing happens on one thread, in groups: a put joins the queue, and the next flush commits all that wait there in
one transaction, so that a durable commit is paid for once and not sixty-four times.  Reads have a thread and a
connection of their own; thanks to the write-ahead log neither side waits for the other.  A store belongs to one event
loop.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipeline.errors import StoreFailed
from pipeline.protocol.items import Item
from pipeline.protocol.response import Response
from stages.persist.store import StoredResponse

_SCHEMA = (
    """
    create table responses (
        id text primary key,
        previous_response_id text,
        created_at integer not null,
        status text not null,
        response text not null,
        input text not null
    )
    """,
)
"""What leads from an empty file to today's schema; ``user_version`` counts the statements that a file has seen."""

_PUT = """
    insert or replace into responses (id, previous_response_id, created_at, status, response, input)
    values (?, ?, ?, ?, ?, ?)
"""

_GET = "select response, input from responses where id = ?"

_CHAIN = """
    with recursive chain (id, previous_response_id, age) as (
        select id, previous_response_id, 0 from responses where id = ?
        union all
        select older.id, older.previous_response_id, age + 1
        from chain join responses as older on older.id = chain.previous_response_id
    )
    select response, input from chain join responses using (id) order by age desc
"""

_BUSY_SECONDS = 10.0
"""How long one process waits for another that is writing to the same file."""

_ROW_ERRORS = (sqlite3.Error, msgspec.MsgspecError, OverflowError, TypeError, ValueError)
"""What one row may raise on its way in or out: also a number over 64 bits, or half a surrogate pair."""

_encode = msgspec.json.Encoder().encode
_decode_response = msgspec.json.Decoder(Response).decode
_decode_input = msgspec.json.Decoder(tuple[Item, ...]).decode


@dataclass(slots=True)
class _Put:
    """A response on its way to disk, and how it fared: what is ``done`` and not ``committed`` has failed."""

    stored: StoredResponse
    done: asyncio.Future[None]
    committed: bool = False
    error: Exception | None = None

    def wake(self) -> None:
        """Let the caller go on, unless it has been cancelled meanwhile."""
        if not self.done.done():
            self.done.set_result(None)


class SqliteStore:
    """A `ResponseStore` in the SQLite file ``path``, which is made, with its folder, where it is missing.

    Raises `StoreFailed` when the file cannot be used, or was written by a newer penstock.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path).absolute()
        with ExitStack() as undo:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                self._write_connection = _connect(file, undo)
                _upgrade(self._write_connection)
                self._read_connection = _connect(file, undo)
            except (OSError, sqlite3.Error) as exc:
                raise StoreFailed(f"The response store {file} cannot be opened: {exc}.") from exc
            undo.pop_all()
        self._write_thread = ThreadPoolExecutor(1, "store-write")
        self._read_thread = ThreadPoolExecutor(1, "store-read")
        self._queue: list[_Put] = []
        self._flushing: asyncio.Task[None] | None = None
        self._closed = False

    async def put(self, stored: StoredResponse) -> None:
        """Keep a response, in place of one with the same id; returns after the commit."""
        self._check_open()
        put = _Put(stored, asyncio.get_running_loop().create_future())
        self._queue.append(put)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        await put.done
        if not put.committed:
            raise StoreFailed("The response could not be stored.") from put.error

    async def get(self, response_id: str) -> StoredResponse | None:
        """The response of that id, if there is one."""
        found = await self._read(_GET, response_id)
        return found[0] if found else None

    async def chain(self, response_id: str) -> tuple[StoredResponse, ...]:
        """The response and all that it continues, oldest first."""
        return await self._read(_CHAIN, response_id)

    async def close(self) -> None:
        """Finish what waits, then close the file."""
        self._closed = True
        if self._flushing is not None:
            await asyncio.shield(self._flushing)
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._write_thread.shutdown()
        self._read_thread.shutdown()
        self._read_connection.close()
        self._write_connection.close()  # the last to close folds the write-ahead log into the file

    def _check_open(self) -> None:
        if self._closed:
            raise StoreFailed("The response store is closed.")

    # Writing

    async def _flush(self) -> None:
        """Commit in groups until no put waits.

        The task starts a turn of the loop after the first put, so that all the puts of that turn make one group; those
        that come while it is being committed make the next.
        """
        loop = asyncio.get_running_loop()
        try:
            while self._queue:
                puts, self._queue = self._queue, []
                try:
                    await loop.run_in_executor(self._write_thread, self._commit, puts)
                finally:
                    for put in puts:
                        put.wake()
        finally:
            self._flushing = None
            for put in self._queue:  # left behind by a flush that was cancelled: they have failed
                put.wake()
            self._queue.clear()

    def _commit(self, puts: list[_Put]) -> None:
        """Write a group in one transaction (on the write thread).

        Whatever goes wrong is an error of these puts: the flush goes on to those that came meanwhile.
        """
        try:
            with _transaction(self._write_connection):
                written = [put for put in puts if self._write(put)]
        except Exception as exc:  # noqa: BLE001
            for put in puts:
                put.error = put.error or exc
        else:
            for put in written:
                put.committed = True

    def _write(self, put: _Put) -> bool:
        """Write one row; when it is the row that is bad, its neighbours go on without it."""
        try:
            self._write_connection.execute(_PUT, _row(put.stored))
        except _ROW_ERRORS as exc:
            put.error = exc
            if not self._write_connection.in_transaction:  # SQLite has rolled back the whole group, as on a full disk
                raise
            return False
        return True

    # Reading

    async def _read(self, query: str, response_id: str) -> tuple[StoredResponse, ...]:
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._read_thread, self._select, query, response_id)

    def _select(self, query: str, response_id: str) -> tuple[StoredResponse, ...]:
        try:
            rows = self._read_connection.execute(query, (response_id,)).fetchall()
            return tuple(StoredResponse(_decode_response(row[0]), _decode_input(row[1])) for row in rows)
        except _ROW_ERRORS as exc:
            raise StoreFailed("The response store could not be read.") from exc


def _row(stored: StoredResponse) -> tuple[str, str | None, int, str, str, str]:
    response = stored.response
    return (
        response.id,
        response.previous_response_id,
        response.created_at,
        response.status,
        _encode(response).decode(),
        _encode(stored.input).decode(),
    )


def _connect(file: Path, undo: ExitStack) -> sqlite3.Connection:
    """A connection that begins no transaction by itself, and whose commits are on disk when they return."""
    connection = sqlite3.connect(file, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    undo.callback(connection.close)
    connection.execute("pragma synchronous = full")
    return connection


def _upgrade(connection: sqlite3.Connection) -> None:
    """Bring the file to today's schema."""
    connection.execute("pragma journal_mode = wal")
    with _transaction(connection):
        (version,) = connection.execute("pragma user_version").fetchone()
        if version > len(_SCHEMA):
            raise StoreFailed(
                f"The response store has schema version {version}, and this penstock knows versions up to "
                f"{len(_SCHEMA)}: run the penstock that wrote it, or a newer one."
            )
        for statement in _SCHEMA[version:]:
            connection.execute(statement)
        connection.execute(f"pragma user_version = {len(_SCHEMA)}")


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction that holds the write lock from its start, so that it cannot fail to get it half-way."""
    connection.execute("begin immediate")
    try:
        yield
        connection.execute("commit")
    finally:
        if connection.in_transaction:
            connection.execute("rollback")
