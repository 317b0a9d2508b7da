"""The rate of durable writes to the store, beside the rate of the bare disk in the same run.

An append is a 4 KB block of a run's events.  An upsert is a 4 KB response that begins and ends: two changes.  Each
writer waits until its own change is durable before it makes the next one.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from penstock.services.runs.event_log import Block
from penstock.services.store.store import Store
from tests.support.stored_responses import begun_response, store_response, stored_response
from tests.support.stores import empty_schema, open_store, running_postgres

SECONDS = 1.0
WRITERS = (1, 64)
BLOCK = bytes(range(256)) * 16
TEXT = "lorem ipsum " * 300

Work: TypeAlias = Callable[[int, int], Awaitable[None]]
"""One write, given the number of the writer and the number of its earlier writes."""


@dataclass(frozen=True)
class Figure:
    """Writes per second, and the 99th percentile of their duration in milliseconds."""

    rate: float
    p99: float

    def __str__(self) -> str:
        return f"{self.rate:11,.0f}{self.p99:9.1f}"


Rows: TypeAlias = dict[tuple[str, int], Figure]
"""By kind of write, and by number of writers."""

BARE = ("pwrite + fdatasync of 4 KB", 1)


async def store_figures(rounds: int) -> list[Rows]:
    """Return the figures of each round."""
    with TemporaryDirectory() as folder:
        async with open_store(str(Path(folder) / "store.sqlite3")) as store, _postgres() as other:
            return [
                {BARE: bare_figure(Path(folder))} | await _rows("SQLite", store) | await _rows("PostgreSQL", other)
                for _ in range(rounds)
            ]


def median(rounds: Sequence[Rows], what: tuple[str, int]) -> Figure:
    """Return the medians of a rate and its 99th percentile."""
    found = [rows[what] for rows in rounds]
    return Figure(statistics.median(each.rate for each in found), statistics.median(each.p99 for each in found))


def to_bare(rounds: Sequence[Rows], what: tuple[str, int]) -> tuple[float, ...]:
    """Return a rate divided by that of the bare disk in the same round, for each round."""
    return tuple(rows[what].rate / rows[BARE].rate for rows in rounds)


def store_table(rounds: Sequence[Rows]) -> str:
    head = f"{'durable, each writer waits':30s}{'writers':>8s}{'per second':>11s}{'p99, ms':>9s}{'to bare':>9s}"
    lines = [
        f"{what[0]:30s}{what[1]:8d}{median(rounds, what)}{statistics.median(to_bare(rounds, what)):9.2f}"
        for what in rounds[0]
    ]
    return "\n".join([head, *lines])


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


async def _measure(work: Work, writers: int) -> Figure:
    durations: list[float] = []
    end = time.perf_counter() + SECONDS

    async def write(writer: int) -> None:
        for number in count():
            started = time.perf_counter()
            if started > end:
                return
            await work(writer, number)
            durations.append(time.perf_counter() - started)

    await asyncio.gather(*map(write, range(writers)))
    return _figure(durations)


def bare_figure(folder: Path) -> Figure:
    durations: list[float] = []
    file = os.open(folder / "bare", os.O_CREAT | os.O_WRONLY)
    end = time.perf_counter() + SECONDS
    while (started := time.perf_counter()) < end:
        os.pwrite(file, BLOCK, len(durations) * len(BLOCK))
        os.fdatasync(file)
        durations.append(time.perf_counter() - started)
    os.close(file)
    return _figure(durations)


def _figure(durations: list[float]) -> Figure:
    return Figure(len(durations) / SECONDS, statistics.quantiles(durations, n=100)[98] * 1e3)


_numbers = count()


async def _append(store: Store, writer: int, number: int) -> None:
    store.append(_run(writer), Block(next(_numbers), 1, BLOCK))
    await store.writer.flushed(_run(writer))


async def _upsert(store: Store, writer: int, number: int) -> None:
    await store_response(store, stored_response(f"resp_{next(_numbers)}", instructions=TEXT))


def _run(writer: int) -> str:
    return f"resp_of_{writer}"
