"""The queue before the database: groups, order, outages, and each kind of change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from penstock.pipeline.errors import StoreFailed
from penstock.services.store import writer as module
from penstock.services.store.database import DatabaseRefused, DatabaseUnavailable, NullDatabase, Statement, Unit
from penstock.services.store.writer import GROUP, LIMIT, TICK, Writer
from tests.support.clock import Clock


class Notebook(NullDatabase):
    """A database that records the groups it gets, refuses bad statements, and can fail or block."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []
        self.tries = 0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.fault: Exception | None = None

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        self.tries += 1
        await asyncio.sleep(0)
        await self.is_open.wait()
        if self.fault is not None:
            raise self.fault
        written = [unit.statements[0].sql for unit in units]
        if any("bad" in sql for sql in written):
            raise DatabaseRefused("bad")
        if any("bug" in sql for sql in written):
            raise ZeroDivisionError
        self.groups.append(written)
        return [(len(unit.statements),) for unit in units]

    @property
    def written(self) -> list[str]:
        return [sql for group in self.groups for sql in group]


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


@pytest.fixture
async def writer(notebook: Notebook) -> AsyncIterator[Writer]:
    writer = Writer(notebook)
    yield writer
    notebook.is_open.set()
    await writer.close()


def say(sql: str, size: int = 0) -> list[Statement]:
    return [Statement(sql, ("x" * size,))]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():
            await asyncio.sleep(0)


async def test_changes_of_one_moment_are_one_group(writer: Writer, notebook: Notebook) -> None:
    notebook.is_open.clear()
    first = [writer.queue(say(f"{n}"), "a") for n in range(3)]
    await until(lambda: notebook.tries == 1)
    second = [writer.queue(say(f"{n}"), "a") for n in range(3, 9)]
    notebook.is_open.set()
    await asyncio.gather(*first, *second)
    assert [len(group) for group in notebook.groups] == [3, 6]
    assert notebook.written == [f"{n}" for n in range(9)]


async def test_group_is_bounded(writer: Writer, notebook: Notebook) -> None:
    """A transaction has a limited size, so that others come between."""
    await asyncio.gather(*(writer.queue(say(f"{n}")) for n in range(2 * GROUP + 1)))
    assert [len(group) for group in notebook.groups] == [GROUP, GROUP, 1]


async def test_refused_change_fails_alone(writer: Writer, notebook: Notebook, caplog: pytest.LogCaptureFixture) -> None:
    changes = [writer.queue(say(sql), f"resp_{sql}") for sql in ("1", "bad", "2", "bug", "3")]
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), StoreFailed, type(None), StoreFailed, type(None)]
    assert notebook.written == ["1", "2", "3"]
    assert "resp_bad" in caplog.text
    await writer.queue(say("4"))
    assert not writer.is_degraded
    assert writer.backlog == 0


async def test_urgent_change_returns_its_row_counts(writer: Writer) -> None:
    assert await writer.carry_out(say("1") * 3) == (3,)


async def test_urgent_change_survives_its_caller(writer: Writer, notebook: Notebook) -> None:
    waits = [asyncio.ensure_future(writer.carry_out(say(f"{n}"), "a")) for n in range(4)]
    await asyncio.sleep(0)
    for wait in waits[::2]:
        wait.cancel()
    outcomes = await asyncio.gather(*waits, return_exceptions=True)
    assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes] == [True, False] * 2
    await writer.flushed("a")
    assert notebook.written == ["0", "1", "2", "3"]


async def test_outage_keeps_durable_changes_and_fails_urgent_ones(
    writer: Writer, notebook: Notebook, caplog: pytest.LogCaptureFixture
) -> None:
    notebook.fault = DatabaseUnavailable("no room")
    lasting = [writer.queue(say(f"{n}"), "a") for n in range(3)]
    with pytest.raises(StoreFailed, match="cannot be reached"):
        await writer.carry_out(say("urgent"))
    assert writer.is_degraded
    notebook.fault = None
    await asyncio.gather(*lasting)
    assert notebook.written == ["0", "1", "2"]
    assert not writer.is_degraded
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
    assert "no room" in caplog.text


async def test_slow_database_is_degraded_and_held_loop_is_not(clock: Clock, writer: Writer, notebook: Notebook) -> None:
    notebook.is_open.clear()
    change = writer.queue(say("1"))
    await clock.move(60.0)
    assert not writer.is_degraded
    for _ in range(10):
        assert not writer.is_degraded
        await clock.move(TICK)
    assert writer.is_degraded
    notebook.is_open.set()
    await change
    await clock.turn()
    assert not writer.is_degraded


async def test_timeout_on_held_loop_is_no_outage(
    clock: Clock, writer: Writer, notebook: Notebook, caplog: pytest.LogCaptureFixture
) -> None:
    notebook.is_open.clear()
    notebook.fault = DatabaseUnavailable("timeout")
    change = writer.queue(say("1"))
    await clock.move(60.0)
    notebook.is_open.set()
    await clock.turn()
    assert (notebook.tries, writer.is_degraded, caplog.records) == (1, False, [])
    await clock.move(1.0)
    assert (notebook.tries, writer.is_degraded) == (2, True)
    notebook.fault = None
    await clock.move(1.0)
    await change


async def test_outage_is_logged_once(writer: Writer, notebook: Notebook, caplog: pytest.LogCaptureFixture) -> None:
    notebook.fault = DatabaseUnavailable("gone")
    change = writer.queue(say("1"))
    await until(lambda: notebook.tries >= 4)
    notebook.fault = None
    await change
    assert len(caplog.records) == 2


async def test_urgent_change_is_tried_at_once(
    writer: Writer, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSES", (3600.0, 3600.0))
    notebook.fault = DatabaseUnavailable("gone")
    lasting = writer.queue(say("lasting"))
    await until(lambda: writer.is_degraded)
    notebook.fault = None
    async with asyncio.timeout(120):
        await writer.carry_out(say("urgent"))
    assert lasting.done()
    assert notebook.written == ["lasting", "urgent"]


async def test_refused_change_in_an_outage_fails_alone(writer: Writer, notebook: Notebook) -> None:
    changes = [writer.queue(say(sql)) for sql in ("1", "bad", "2")]
    await until(lambda: notebook.tries >= 2)
    notebook.fault = DatabaseUnavailable("gone")
    await until(lambda: writer.is_degraded)
    notebook.fault = None
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), StoreFailed, type(None)]
    assert notebook.written == ["1", "2"]


@pytest.mark.defect("V25")
async def test_backlog_is_bounded(writer: Writer, notebook: Notebook) -> None:
    notebook.fault = DatabaseUnavailable("gone")
    writer.queue(say("1", LIMIT))
    writer.check()
    last = writer.queue(say("2", 1))
    with pytest.raises(StoreFailed, match="too many changes wait"):
        writer.check()
    notebook.fault = None
    await last
    writer.check()
    assert writer.backlog == 0


async def test_heartbeat_precedes_waiting_changes(writer: Writer, notebook: Notebook) -> None:
    notebook.is_open.clear()
    for number in range(GROUP + 1):
        writer.queue(say(f"{number}"))
    await until(lambda: notebook.tries == 1)
    beat = asyncio.create_task(writer.carry_out(say("beat"), is_first=True))
    await asyncio.sleep(0)
    notebook.is_open.set()
    await beat
    await writer.flushed()
    assert notebook.groups[1:] == [["beat", f"{GROUP}"]]


async def test_read_waits_for_changes_of_its_id(writer: Writer, notebook: Notebook) -> None:
    notebook.is_open.clear()
    writer.queue(say("1"), "a", "b")
    await writer.flushed("c")
    waits = [asyncio.ensure_future(writer.flushed(key)) for key in ("a", "b", None)]
    await until(lambda: notebook.tries == 1)
    assert not any(wait.done() for wait in waits)
    notebook.is_open.set()
    await asyncio.gather(*waits)
    assert notebook.written == ["1"]
    await writer.flushed("a")
    await writer.flushed()


async def test_read_waits_for_changes_before_a_withdrawn_one(
    writer: Writer, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_WAIT", 0.02)
    notebook.fault = DatabaseUnavailable("gone")
    writer.queue(say("1"), "a")
    with pytest.raises(StoreFailed, match="cannot be reached"):
        await writer.carry_out(say("urgent"), "a")
    for key in ("a", None):
        with pytest.raises(StoreFailed, match="not yet"):
            await writer.flushed(key)
    notebook.fault = None
    await until(lambda: notebook.written == ["1"])
    await writer.flushed("a")


async def test_read_has_a_timeout(writer: Writer, notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_WAIT", 0.02)
    notebook.is_open.clear()
    writer.queue(say("1"), "a")
    with pytest.raises(StoreFailed, match="not yet"):
        await writer.flushed("a")


async def test_close_writes_waiting_changes(notebook: Notebook) -> None:
    writer = Writer(notebook)
    changes = [writer.queue(say(f"{n}")) for n in range(GROUP + 1)]
    await writer.close()
    await writer.close()
    assert all(change.done() for change in changes)
    assert len(notebook.written) == GROUP + 1
    with pytest.raises(StoreFailed, match="closed"):
        writer.queue(say("late"))
    with pytest.raises(StoreFailed, match="closed"):
        await writer.carry_out(say("late"))


async def test_close_retries_once_and_names_lost_responses(
    notebook: Notebook, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSES", (3600.0, 3600.0))
    writer = Writer(notebook)
    notebook.fault = DatabaseUnavailable("gone")
    changes = [writer.queue(say("x"), name) for name in ("resp_1", "resp_2", "resp_1")]
    await until(lambda: writer.is_degraded)
    async with asyncio.timeout(120):
        await writer.close()
    assert notebook.tries == 2
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    assert all(isinstance(outcome, StoreFailed) for outcome in outcomes)
    assert "resp_1, resp_2" in caplog.text


async def test_close_after_an_outage_loses_nothing(notebook: Notebook) -> None:
    writer = Writer(notebook)
    notebook.fault = DatabaseUnavailable("gone")
    change = writer.queue(say("1"))
    await until(lambda: writer.is_degraded)
    notebook.fault = None
    await writer.close()
    await change
    assert notebook.written == ["1"]
