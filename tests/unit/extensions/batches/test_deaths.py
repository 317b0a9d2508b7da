"""A server dies at each of its writes, before or after the commit: the next one gives each line its one result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from penstock.extensions.batches import line_runs, runner
from penstock.extensions.batches.batch import StoredBatch
from penstock.extensions.batches.stored_batches import StoredBatches
from penstock.pipeline.errors import StoreFailed
from penstock.services.store.database import Database, DatabaseUnavailable, Unit
from penstock.services.store.store import Store
from tests.support.batches import (
    Answers,
    a_batch,
    batches_of,
    contents,
    ended,
    found,
    lines,
    running_batches,
)
from tests.support.stored_responses import expire_heartbeat
from tests.support.stores import FaultyDatabase, database_at, open_store

pytestmark = [pytest.mark.io, pytest.mark.slow]

LINES = 3


class Dying(FaultyDatabase):
    """A database that a server loses for ever at one of its writes, which may have been committed."""

    def __init__(self, inner: Database, last: int, *, commits: bool) -> None:
        super().__init__(inner)
        self.left, self.commits = last, commits
        self.lost = asyncio.Event()

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        self.left -= 1
        if self.left == 0 and self.commits:
            await super().write(units)
        if self.left <= 0:
            self.is_down = True
            self.lost.set()
            raise DatabaseUnavailable("The server has died.")
        return await super().write(units)


def validation(stored: StoredBatches) -> Callable[[StoredBatch], Any]:
    async def validate(batch: StoredBatch) -> None:
        for line in lines(LINES):
            await stored.add_lines(batch.id, [line])
        await stored.begin(batch.id)

    return validate


async def until(event: asyncio.Event, store: Store, batch: StoredBatch) -> None:
    """Wait until the database is lost, or the batch has ended before."""
    over = asyncio.create_task(ended(store, batch))
    lost = asyncio.create_task(event.wait())
    await asyncio.wait([over, lost], return_when=asyncio.FIRST_COMPLETED)
    over.cancel()
    lost.cancel()
    await asyncio.gather(over, lost, return_exceptions=True)


async def survived(store_at: str, other: Store, last: int, *, commits: bool) -> bool:
    """Run a batch on a server that dies at a write, and then on another; False if it has ended before."""
    dying = Dying(database_at(store_at), last + 1, commits=commits)
    store = Store(dying)
    await store.open()
    batch = a_batch()
    await batches_of(other).create(batch)
    await batches_of(other).release_all()
    with suppress(StoreFailed):  # it dies before it has begun
        async with running_batches(store, Answers(), validate=validation(batches_of(store)), places=2):
            await until(dying.lost, other, batch)
    await store.close()
    has_died = not (await found(other, batch)).has_ended
    await expire_heartbeat(other, "one")
    await other.recover_parts()
    async with running_batches(other, Answers(), validate=validation(batches_of(other)), name="other"):
        over = await ended(other, batch)
    assert (over.status, over.total, over.succeeded) == ("completed", LINES, LINES)
    assert await contents(other, over.output_file_id) == [f"line {n} succeeded" for n in range(1, LINES + 1)]
    noted = await other.context.read("select id from ledger where id like $1", f"{batch.id}:%")
    assert sorted(name for (name,) in noted) == [f"{batch.id}:{n}" for n in range(1, LINES + 1)]
    await other.sweep(3600.0, 3600.0)
    left = await other.context.read("select id from files where id not in (select output_file_id from batches)")
    assert [name for (name,) in left] == []
    return has_died


@pytest.mark.parametrize("commits", [False, True])
async def test_death_at_any_write_loses_and_doubles_nothing(
    store_at: str, monkeypatch: pytest.MonkeyPatch, *, commits: bool
) -> None:
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(line_runs, "STOP_SECONDS", 0.0)
    async with open_store(store_at) as other:
        last = 1
        while await survived(store_at, other, last, commits=commits):
            last += 1
        assert last > 12
