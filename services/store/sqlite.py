"""SQLite: a durable store in one file, without a service to run, shared by the processes of one machine.

All writes run on one thread.  Reads have their own thread and connection, and so have searches; with the write-ahead
log, reads and writes do not wait for each other.
"""

from __future__ import annotations

import asyncio
import glob
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from shutil import disk_usage
from typing import TypeVar

from penstock.pipeline.errors import StoreFailed
from penstock.pipeline.foreign_errors import named_error
from penstock.services.store import database
from penstock.services.store.migrations import EXECUTED, EXECUTED_OF_PARTS, EXECUTED_TABLES, SQLITE
from penstock.services.store.parts import tables_of_parts
from penstock.services.store.statements import bulks

T = TypeVar("T")

_PLACEHOLDER = re.compile(r"\$([0-9]+)")

_WITH_TERM = re.compile(re.escape(database.with_term("PLACE")).replace("PLACE", r"(\$[0-9]+)"))

_BUSY_SECONDS = 5.0
"""Seconds that one process waits for another to finish writing to the same file."""


class SqliteDatabase:
    """A `Database` in the file ``path``, which is created, with its folder, if it does not exist."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).absolute()
        self._write_thread = ThreadPoolExecutor(1, "store-write")
        self._read_thread = ThreadPoolExecutor(1, "store-read")
        self._search_thread = ThreadPoolExecutor(1, "store-search")
        self._connections = ExitStack()

    async def open(self) -> None:
        """Open the file; raises `StoreFailed` if it cannot be used, or was written by a newer penstock."""
        await asyncio.to_thread(self._open)

    async def write(self, units: Sequence[database.Unit]) -> list[tuple[int, ...]]:
        return await self._on(self._write_thread, lambda: self._write(units))

    async def read(self, sql: str, *arguments: database.Value) -> Sequence[database.Row]:
        if database.takes_long(sql):
            return await self._on(self._search_thread, lambda: _rows(self._searching, sql, arguments))
        return await self._on(self._read_thread, lambda: _rows(self._reading, sql, arguments))

    async def size(self) -> int:
        pragmas = ("page_count", "freelist_count", "page_size")
        pages, free, size = [(await self.read(f"pragma {name}"))[0][0] for name in pragmas]
        return int((pages - free) * size)

    async def room(self) -> int:
        """Return the bytes that the file has free within, and may still grow by."""
        return await self._on(self._write_thread, self._room)

    def _room(self) -> int:
        names = ("page_count", "freelist_count", "page_size", "max_page_count")
        pages, free, size, most = (self._writing.execute(f"pragma {name}").fetchone()[0] for name in names)
        return int(min(disk_usage(self._file.parent).free, (most - pages) * size) + free * size)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    async def _on(self, thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, work)
        except sqlite3.OperationalError as exc:  # locked, disk full, or file removed
            raise database.DatabaseUnavailable(named_error(exc)) from exc
        except (sqlite3.Error, OverflowError, UnicodeError) as exc:
            raise database.DatabaseRefused(named_error(exc)) from exc

    def _open(self) -> None:
        with ExitStack() as undo:
            try:
                _make_private(self._file)
                self._inode = _inode(self._file)
                self._writing = _connect(self._file, undo)
                _upgrade(self._writing)
                self._reading = _connect(self._file, undo)
                self._searching = _connect(self._file, undo)
            except (OSError, sqlite3.Error) as exc:
                raise StoreFailed(f"The store {self._file} cannot be opened: {named_error(exc)}.") from exc
            self._connections = undo.pop_all()

    def _close(self) -> None:
        self._write_thread.shutdown()
        self._read_thread.shutdown()
        self._search_thread.shutdown()
        self._connections.close()  # the write connection is closed last, and merges the write-ahead log into the file

    def _write(self, units: Sequence[database.Unit]) -> list[tuple[int, ...]]:
        if _inode(self._file) != self._inode:
            # SQLite would go on in a file that no other process can open
            raise database.DatabaseUnavailable(f"{self._file} was removed or replaced: put it back, or restart")
        counts: list[tuple[int, ...]] = []
        with _transaction(self._writing):
            for counted, group in groupby(units, attrgetter("counted")):
                merged = tuple(group)
                counts += self._counted(merged) if counted else self._in_bulk(merged)
        return counts

    def _counted(self, units: Sequence[database.Unit]) -> list[tuple[int, ...]]:
        return [tuple(self._changed(unit)) for unit in units]

    def _changed(self, unit: database.Unit) -> list[int]:
        counts: list[int] = []
        for statement in unit.statements:
            counts.append(self._execute(statement))
            if unit.fenced and not counts[0]:
                break
        return counts

    def _execute(self, statement: database.Statement) -> int:
        return _executed(self._writing, statement.sql, statement.arguments).rowcount

    def _in_bulk(self, units: Sequence[database.Unit]) -> list[tuple[int, ...]]:
        for sql, arguments in bulks(units).items():
            text, places = _translated(sql)
            self._writing.executemany(text, [[each[place] for place in places] for each in arguments])
        return [()] * len(units)


def _rows(connection: sqlite3.Connection, sql: str, arguments: Sequence[database.Value]) -> Sequence[database.Row]:
    return _executed(connection, sql, arguments).fetchall()


def _executed(connection: sqlite3.Connection, sql: str, arguments: Sequence[database.Value]) -> sqlite3.Cursor:
    text, places = _translated(sql)
    return connection.execute(text, [arguments[place] for place in places])


@cache
def _translated(sql: str) -> tuple[str, tuple[int, ...]]:
    """Return a statement in SQLite's dialect, and the place of the argument of each of its placeholders.

    It needs no row locks, because there is one writer at a time.
    """
    sql = sql.replace(database.NOW, "clock()").replace(database.SHARED, "").replace(database.OCTETS, "octets")
    sql = sql.replace("string_agg(", "group_concat(")
    sql = _WITH_TERM.sub(_matching, sql) if database.is_search(sql) else sql
    return _PLACEHOLDER.sub("?", sql), tuple(int(number) - 1 for number in _PLACEHOLDER.findall(sql))


def _matching(found: re.Match[str]) -> str:
    """Return the query for the chunks with a term; quotes make it a term, whatever is in it.

    A term has no space.  FTS5 would read one as the gap of a phrase, so it becomes a character of no term.
    """
    term = f"replace({found[1]}, ' ', char(65535))"
    quoted = f"""'"' || replace({term}, '"', '""') || '"'"""
    return f"from (select rowid as number from vector_store_terms where vector_store_terms match {quoted})"


def _make_private(file: Path) -> None:
    """Create the file, readable by its owner alone; mend an existing one, and its folder if that holds nothing else."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not file.exists():
        file.touch(mode=0o600)
    parts = list(file.parent.glob(f"{glob.escape(file.name)}*"))  # with the write-ahead log and its index
    modes = dict.fromkeys(parts, 0o600)
    if len(parts) == len(list(file.parent.iterdir())):
        modes[file.parent] = 0o700
    for path, mode in modes.items():
        with suppress(PermissionError, FileNotFoundError):  # it is another user's, or was closed by another server
            path.chmod(mode)


def _inode(file: Path) -> tuple[int, int] | None:
    """Return the identity of a file; None if it does not exist."""
    try:
        stats = file.stat()
    except FileNotFoundError:
        return None
    return stats.st_dev, stats.st_ino


def _connect(file: Path, undo: ExitStack) -> sqlite3.Connection:
    """Open a connection with explicit transactions only, and commits that are on disk when they return."""
    connection = sqlite3.connect(file, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    undo.callback(connection.close)
    connection.execute("pragma synchronous = full")
    connection.create_function("clock", 0, time.time)
    connection.create_function("octets", 1, _octets, deterministic=True)
    return connection


def _octets(text: str | None) -> int | None:
    return None if text is None else len(text.encode())


def _upgrade(connection: sqlite3.Connection) -> None:
    """Upgrade the file to the current schema."""
    _enable_wal(connection)
    with _transaction(connection):
        for table in EXECUTED_TABLES:
            connection.execute(table)
        (usable_from,) = connection.execute("pragma user_version").fetchone()
        (executed,) = connection.execute(EXECUTED).fetchone()
        of_parts = dict(connection.execute(EXECUTED_OF_PARTS).fetchall())
        statements, usable_from = SQLITE.upgrade(usable_from, executed, of_parts, tables_of_parts())
        for statement in statements:
            connection.execute(statement)
        connection.execute(f"pragma user_version = {usable_from}")


def _enable_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to a write-ahead log.

    Retries, because SQLite itself does not wait for another process that makes the same switch.
    """
    deadline = time.monotonic() + _BUSY_SECONDS
    while time.monotonic() < deadline:
        with suppress(sqlite3.OperationalError):
            connection.execute("pragma journal_mode = wal")
            return
        time.sleep(0.02)
    connection.execute("pragma journal_mode = wal")


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("begin immediate")
    try:
        yield
        connection.execute("commit")
    except BaseException:
        if connection.in_transaction:  # SQLite itself may have rolled back, as when the disk is full
            connection.execute("rollback")
        raise
