"""The rate of durable writes to the store, beside the rate of the bare disk in the same run.

An append is a 4 KB block of a run's events.  An upsert is a 4 KB response that begins and ends: two changes.  Each
writer waits until its own change is durable before it makes the next one.  SQLite alone, and the bare disk, get the
blocks of all writers at once.  SQLite alone keeps those of earlier rounds, as the store does: an index that has grown
takes a page of its own for each writer.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from penstock.services.runs.event_log import Block
from penstock.services.store.store import Store
from tests.bench.figures import Comparison, Figure
from tests.support.stored_responses import begun_response, store_response, stored_response
from tests.support.stores import empty_schema, open_store, running_postgres

SECONDS = 1.0
FEWEST_WRITES = 2
"""As many as a percentile needs: on a slow disk a writer goes on until it has made them."""

WRITERS = (1, 64)
BLOCK = bytes(range(256)) * 16
TEXT = "lorem ipsum " * 300

Work: TypeAlias = Callable[[int, int], Awaitable[None]]
"""One write, given the number of the writer and the number of its earlier writes."""


@dataclass(frozen=True)
class Writes:
    """Writes per second, and the 99th percentile of their duration in milliseconds."""

    rate: float
    p99: float


Rows: TypeAlias = dict[tuple[str, int], Writes]
"""By kind of write, and by number of writers."""

DISK = ("the bare disk: pwrite and fdatasync", WRITERS[-1])
ALONE = ("SQLite alone: inserts and a commit", WRITERS[-1])
APPENDS, UPSERTS = (("SQLite, appends", WRITERS[-1]), ("SQLite, upserts", WRITERS[-1]))


async def store_figures(rounds: int) -> list[Rows]:
    """Return the figures of SQLite, of each round."""
    with TemporaryDirectory() as folder:
        path = Path(folder)
        async with open_store(str(path / "store.sqlite3")) as store:
            return [
                {DISK: _to_disk(path), ALONE: _to_sqlite(path)} | await _rows("SQLite", store) for _ in range(rounds)
            ]


async def postgres_figures(rounds: int) -> list[Rows]:
    """Return the figures of PostgreSQL, of each round."""
    with TemporaryDirectory() as folder:
        async with _postgres() as store:
            return [{DISK: _to_disk(Path(folder))} | await _rows("PostgreSQL", store) for _ in range(rounds)]


def microseconds(rounds: Sequence[Rows], what: tuple[str, int]) -> Figure:
    """Return the time of one write."""
    return Figure(tuple(1e6 / rows[what].rate for rows in rounds))


def store_table(rounds: Sequence[Rows]) -> str:
    lines = [f"{'durable, each writer waits':40s}{'writers':>8s}{'per second':>11s}{'p99, ms':>9s}{'to the disk':>12s}"]
    for what in rounds[0]:
        rate, p99 = (statistics.median(getattr(rows[what], name) for rows in rounds) for name in ("rate", "p99"))
        ratio = Comparison({}, microseconds(rounds, what), microseconds(rounds, DISK)).ratio
        lines.append(f"{what[0]:40s}{what[1]:8d}{rate:11,.0f}{p99:9.1f}{ratio:12.2f}")
    return "\n".join(lines)


@asynccontextmanager
async def _postgres() -> AsyncIterator[Store]:
    """Open a store in a PostgreSQL whose commits survive a power failure."""
    with running_postgres("fsync=on") as server:
        async with empty_schema(server) as url, open_store(url) as store:
            yield store


async def _rows(name: str, store: Store) -> Rows:
    rows: Rows = {}
    for writers in WRITERS:
        for what, work in (("appends", partial(_append, store)), ("upserts", partial(_upsert, store))):
            for writer in range(writers):
                store.begin(begun_response(stored_response(_run(writer))))
            rows[f"{name}, {what}", writers] = await _measure(work, writers)
    return rows


async def _measure(work: Work, writers: int) -> Writes:
    durations: list[float] = []
    begun = time.perf_counter()

    async def write(writer: int) -> None:
        for number in count():
            started = time.perf_counter()
            if started - begun > SECONDS and number >= FEWEST_WRITES:
                return
            await work(writer, number)
            durations.append(time.perf_counter() - started)

    await asyncio.gather(*map(write, range(writers)))
    return _figure(durations, time.perf_counter() - begun)


def _to_disk(folder: Path) -> Writes:
    with (folder / "bare").open("wb", buffering=0) as file:

        def write(number: int) -> None:
            os.pwrite(file.fileno(), BLOCK * WRITERS[-1], number * len(BLOCK) * WRITERS[-1])
            os.fdatasync(file.fileno())

        return _timed(write)


def _to_sqlite(folder: Path) -> Writes:
    with closing(sqlite3.connect(folder / "alone.sqlite3", isolation_level=None)) as database:
        database.execute("pragma synchronous = full")
        database.execute("pragma journal_mode = wal")
        columns = "writer integer, number integer, data blob, primary key (writer, number)"
        database.execute(f"create table if not exists blocks ({columns})")

        def write(_: int) -> None:
            number = next(_numbers)
            blocks = [(writer, number, BLOCK) for writer in range(WRITERS[-1])]
            database.execute("begin")
            database.executemany("insert into blocks values (?, ?, ?)", blocks)
            database.execute("commit")

        return _timed(write)


def _timed(write: Callable[[int], None]) -> Writes:
    """Return the figure of a function that makes a durable write for every writer at once."""
    durations: list[float] = []
    begun = time.perf_counter()
    while (started := time.perf_counter()) - begun < SECONDS or len(durations) < FEWEST_WRITES:
        write(len(durations))
        durations.append(time.perf_counter() - started)
    found = _figure(durations, time.perf_counter() - begun)
    return Writes(found.rate * WRITERS[-1], found.p99)


def _figure(durations: list[float], elapsed: float) -> Writes:
    return Writes(len(durations) / elapsed, statistics.quantiles(durations, n=100)[98] * 1e3)


_numbers = count()


async def _append(store: Store, writer: int, number: int) -> None:
    await store.append(_run(writer), Block(next(_numbers), 1, BLOCK))


async def _upsert(store: Store, writer: int, number: int) -> None:
    await store_response(store, stored_response(f"resp_{next(_numbers)}", instructions=TEXT))


def _run(writer: int) -> str:
    return f"resp_of_{writer}"
