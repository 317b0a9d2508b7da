"""Responses in one SQLite file: durable, with no service to run, and shared by the processes of one machine.

All writing happens on one thread, in groups: a change joins the queue, and the next flush commits all that wait there
in one transaction, so that a durable commit is paid for once and not sixty-four times.  Reads have a thread and a
connection of their own; thanks to the write-ahead log neither side waits for the other.  Which response holds which
item is an index that SQLite keeps by itself, in triggers.  A store belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
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
    "create table items (id text, response_id text, primary key (id, response_id)) without rowid",
    "create index items_of_response on items (response_id)",
    """
    create trigger response_stored after insert on responses begin
        delete from items where response_id = new.id;
        insert into items
            select json_extract(value, '$.id'), new.id from json_each(new.input)
            union select json_extract(value, '$.id'), new.id from json_each(new.response, '$.output');
    end
    """,
    """
    create trigger response_deleted after delete on responses begin
        delete from items where response_id = old.id;
    end
    """,
    """
    insert into items
        select json_extract(value, '$.id'), responses.id from responses, json_each(input)
        union select json_extract(value, '$.id'), responses.id from responses, json_each(response, '$.output')
    """,
)
"""What leads from an empty file to today's schema; ``user_version`` counts the statements that a file has seen."""

_PUT = """
    insert or replace into responses (id, previous_response_id, created_at, status, response, input)
    values (?, ?, ?, ?, ?, ?)
"""

_DELETE = "delete from responses where id = ?"

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

_HOLDERS = """
    select response, input from responses where rowid in (
        select max(responses.rowid)
        from items join responses on responses.id = items.response_id
        where items.id in (select value from json_each(?))
        group by items.id
    ) order by rowid
"""
"""The responses that were the last to hold each of some items; a row that is replaced gets a new, higher rowid."""

_BUSY_SECONDS = 10.0
"""How long one process waits for another that is writing to the same file."""

_ROW_ERRORS = (sqlite3.Error, msgspec.MsgspecError, OverflowError, TypeError, ValueError)
"""What one row may raise on its way in or out: also a number over 64 bits, or half a surrogate pair."""

_encode = msgspec.json.Encoder().encode
_decode_response = msgspec.json.Decoder(Response).decode
_decode_input = msgspec.json.Decoder(tuple[Item, ...]).decode


@dataclass(slots=True)
class _Change:
    """One statement on its way to disk, and how it fared: what is ``done`` and not ``committed`` has failed."""

    statement: str
    row: Callable[[], tuple[str | int | None, ...]]
    done: asyncio.Future[None]
    rows_changed: int = 0
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
        self._queue: list[_Change] = []
        self._flushing: asyncio.Task[None] | None = None
        self._closed = False

    async def put(self, stored: StoredResponse) -> None:
        """Keep a response, in place of one with the same id; returns after the commit."""
        change = await self._changed(_PUT, partial(_row, stored))
        if not change.committed:
            raise StoreFailed("The response could not be stored.") from change.error

    async def delete(self, response_id: str) -> bool:
        """Forget a response and its items; returns after the commit, and says whether there was one."""
        change = await self._changed(_DELETE, lambda: (response_id,))
        if not change.committed:
            raise StoreFailed("The response could not be deleted.") from change.error
        return change.rows_changed > 0

    async def get(self, response_id: str) -> StoredResponse | None:
        """The response of that id, if there is one."""
        found = await self._read(_GET, response_id)
        return found[0] if found else None

    async def chain(self, response_id: str) -> tuple[StoredResponse, ...]:
        """The response and all that it continues, oldest first."""
        return await self._read(_CHAIN, response_id)

    async def items(self, ids: Sequence[str]) -> dict[str, Item]:
        """The items of those ids, each as it was stored last."""
        wanted, found = frozenset(ids), dict[str, Item]()
        for stored in await self._read(_HOLDERS, json.dumps(ids)):
            found |= {item.id: item for item in stored.items if item.id in wanted}
        return found

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

    async def _changed(self, statement: str, row: Callable[[], tuple[str | int | None, ...]]) -> _Change:
        """Queue a statement, and wait until it is done."""
        self._check_open()
        change = _Change(statement, row, asyncio.get_running_loop().create_future())
        self._queue.append(change)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        await change.done
        return change

    async def _flush(self) -> None:
        """Commit in groups until no change waits.

        The task starts a turn of the loop after the first change, so that all the changes of that turn make one group;
        those that come while it is being committed make the next.
        """
        loop = asyncio.get_running_loop()
        try:
            while self._queue:
                changes, self._queue = self._queue, []
                try:
                    await loop.run_in_executor(self._write_thread, self._commit, changes)
                finally:
                    for change in changes:
                        change.wake()
        finally:
            self._flushing = None
            for change in self._queue:  # left behind by a flush that was cancelled: they have failed
                change.wake()
            self._queue.clear()

    def _commit(self, changes: list[_Change]) -> None:
        """Write a group in one transaction (on the write thread).

        Whatever goes wrong is an error of these changes: the flush goes on to those that came meanwhile.
        """
        try:
            with _transaction(self._write_connection):
                written = [change for change in changes if self._write(change)]
        except Exception as exc:  # noqa: BLE001
            for change in changes:
                change.error = change.error or exc
        else:
            for change in written:
                change.committed = True

    def _write(self, change: _Change) -> bool:
        """Run one statement; when it is its row that is bad, its neighbours go on without it."""
        try:
            change.rows_changed = self._write_connection.execute(change.statement, change.row()).rowcount
        except _ROW_ERRORS as exc:
            change.error = exc
            if not self._write_connection.in_transaction:  # SQLite has rolled back the whole group, as on a full disk
                raise
            return False
        return True

    # Reading

    async def _read(self, query: str, argument: str) -> tuple[StoredResponse, ...]:
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._read_thread, self._select, query, argument)

    def _select(self, query: str, argument: str) -> tuple[StoredResponse, ...]:
        try:
            rows = self._read_connection.execute(query, (argument,)).fetchall()
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
