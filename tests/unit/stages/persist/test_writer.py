"""The queue before the database: groups, order, outages, and what happens to each kind of change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from pipeline.errors import StoreFailed
from stages.persist import writer as module
from stages.persist.database import Nowhere, Refused, Statement, Unavailable, Unit
from stages.persist.writer import GROUP, LIMIT, Writer


class Notebook(Nowhere):
    """A database that notes the groups it was given, refuses what is bad, and can be closed or slow."""

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
        said = [unit.statements[0].sql for unit in units]
        if any("bad" in sql for sql in said):
            raise Refused("bad")
        if any("bug" in sql for sql in said):
            raise ZeroDivisionError
        self.groups.append(said)
        return [(len(unit.statements),) for unit in units]

    @property
    def said(self) -> list[str]:
        """All that was written, in order."""
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


async def test_changes_that_come_together_are_written_together(writer: Writer, notebook: Notebook) -> None:
    """All changes of one turn of the loop are one group; those that come during a commit are the next."""
    notebook.is_open.clear()
    first = [writer.queue(say(f"{n}"), "a") for n in range(3)]
    await asyncio.sleep(0.01)
    second = [writer.queue(say(f"{n}"), "a") for n in range(3, 9)]
    notebook.is_open.set()
    await asyncio.gather(*first, *second)
    assert [len(group) for group in notebook.groups] == [3, 6]
    assert notebook.said == [f"{n}" for n in range(9)]


async def test_a_group_is_bounded(writer: Writer, notebook: Notebook) -> None:
    """However much waits, one transaction holds so much and no more, so that others come between."""
    await asyncio.gather(*(writer.queue(say(f"{n}")) for n in range(2 * GROUP + 1)))
    assert [len(group) for group in notebook.groups] == [GROUP, GROUP, 1]


async def test_a_change_that_is_refused_fails_alone(
    writer: Writer, notebook: Notebook, caplog: pytest.LogCaptureFixture
) -> None:
    """Its neighbours in the same group are written, in their order, and so is what comes behind."""
    changes = [writer.queue(say(sql), f"resp_{sql}") for sql in ("1", "bad", "2", "bug", "3")]
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), StoreFailed, type(None), StoreFailed, type(None)]
    assert notebook.said == ["1", "2", "3"]
    assert "resp_bad" in caplog.text
    await writer.queue(say("4"))
    assert not writer.is_degraded
    assert writer.backlog == 0


async def test_an_urgent_change_tells_what_it_changed(writer: Writer) -> None:
    """Who waits for a change learns how many rows it was."""
    assert await writer.carry_out(say("1") * 3) == (3,)


async def test_an_urgent_change_whose_caller_leaves_is_carried_out(writer: Writer, notebook: Notebook) -> None:
    """Cancelling the wait cancels nothing else, and harms no neighbour."""
    waits = [asyncio.ensure_future(writer.carry_out(say(f"{n}"), "a")) for n in range(4)]
    await asyncio.sleep(0)
    for wait in waits[::2]:
        wait.cancel()
    outcomes = await asyncio.gather(*waits, return_exceptions=True)
    assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes] == [True, False] * 2
    await writer.settled("a")
    assert notebook.said == ["0", "1", "2", "3"]


async def test_an_outage_keeps_lasting_changes_and_fails_urgent_ones(
    writer: Writer, notebook: Notebook, caplog: pytest.LogCaptureFixture
) -> None:
    """Lasting changes are written in their order once the database is back, urgent ones were withdrawn."""
    notebook.fault = Unavailable("no room")
    lasting = [writer.queue(say(f"{n}"), "a") for n in range(3)]
    with pytest.raises(StoreFailed, match="cannot be reached"):
        await writer.carry_out(say("urgent"))
    assert writer.is_degraded
    notebook.fault = None
    await asyncio.gather(*lasting)
    assert notebook.said == ["0", "1", "2"]
    assert not writer.is_degraded
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
    assert "no room" in caplog.text


async def test_an_outage_is_logged_once(writer: Writer, notebook: Notebook, caplog: pytest.LogCaptureFixture) -> None:
    """However often it is tried again, an outage has one line for its beginning and one for its end."""
    notebook.fault = Unavailable("gone")
    change = writer.queue(say("1"))
    await until(lambda: notebook.tries >= 4)
    notebook.fault = None
    await change
    assert len(caplog.records) == 2


async def test_an_urgent_change_does_not_wait_for_the_next_try(
    writer: Writer, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the pause between two tries it is tried at once, and takes what waits along."""
    monkeypatch.setattr(module, "PAUSES", (3600.0, 3600.0))
    notebook.fault = Unavailable("gone")
    lasting = writer.queue(say("lasting"))
    await until(lambda: writer.is_degraded)
    notebook.fault = None
    async with asyncio.timeout(120):
        await writer.carry_out(say("urgent"))
    assert lasting.done()
    assert notebook.said == ["lasting", "urgent"]


async def test_a_refused_change_among_others_survives_an_outage(writer: Writer, notebook: Notebook) -> None:
    """Where the database goes while a group is tried one by one, nothing is lost but what is bad."""
    changes = [writer.queue(say(sql)) for sql in ("1", "bad", "2")]
    await until(lambda: notebook.tries >= 2)
    notebook.fault = Unavailable("gone")
    await until(lambda: writer.is_degraded)
    notebook.fault = None
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), StoreFailed, type(None)]
    assert notebook.said == ["1", "2"]


@pytest.mark.defect("V25", "B17")
async def test_what_waits_is_bounded(writer: Writer, notebook: Notebook) -> None:
    """Past the limit nothing new is begun, while what runs may go on; once all is written there is room again."""
    notebook.fault = Unavailable("gone")
    writer.queue(say("1", LIMIT))
    writer.check()
    last = writer.queue(say("2", 1))
    with pytest.raises(StoreFailed, match="too much waits"):
        writer.check()
    notebook.fault = None
    await last
    writer.check()
    assert writer.backlog == 0


async def test_what_is_first_goes_ahead_of_all_that_waits(writer: Writer, notebook: Notebook) -> None:
    """A sign of life is not held up by a long queue, and holds up nothing itself."""
    notebook.is_open.clear()
    for number in range(GROUP + 1):
        writer.queue(say(f"{number}"))
    await asyncio.sleep(0.01)
    beat = asyncio.create_task(writer.carry_out(say("beat"), is_first=True))
    await asyncio.sleep(0)
    notebook.is_open.set()
    await beat
    await writer.settled()
    assert notebook.groups[1:] == [["beat", f"{GROUP}"]]


async def test_a_read_waits_for_its_own_changes(writer: Writer, notebook: Notebook) -> None:
    """Until what was queued for an id is in; other ids are not waited for, all of them are where none is named."""
    notebook.is_open.clear()
    writer.queue(say("1"), "a", "b")
    await writer.settled("c")
    waits = [asyncio.ensure_future(writer.settled(key)) for key in ("a", "b", None)]
    await asyncio.sleep(0.01)
    assert not any(wait.done() for wait in waits)
    notebook.is_open.set()
    await asyncio.gather(*waits)
    assert notebook.said == ["1"]
    await writer.settled("a")
    await writer.settled()


async def test_a_read_waits_behind_what_was_withdrawn(
    writer: Writer, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an outage, an urgent change that failed leaves those before it to be waited for."""
    monkeypatch.setattr(module, "READ_PATIENCE", 0.02)
    notebook.fault = Unavailable("gone")
    writer.queue(say("1"), "a")
    with pytest.raises(StoreFailed, match="cannot be reached"):
        await writer.carry_out(say("urgent"), "a")
    for key in ("a", None):
        with pytest.raises(StoreFailed, match="not yet"):
            await writer.settled(key)
    notebook.fault = None
    await until(lambda: notebook.said == ["1"])
    await writer.settled("a")


async def test_a_read_does_not_wait_for_ever(
    writer: Writer, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the store does not answer, a read of what waits there fails."""
    monkeypatch.setattr(module, "READ_PATIENCE", 0.02)
    notebook.is_open.clear()
    writer.queue(say("1"), "a")
    with pytest.raises(StoreFailed, match="not yet"):
        await writer.settled("a")


async def test_close_writes_what_waits(notebook: Notebook) -> None:
    """Whatever was queued is carried out before the end, and nothing is taken afterwards."""
    writer = Writer(notebook)
    changes = [writer.queue(say(f"{n}")) for n in range(GROUP + 1)]
    await writer.close()
    await writer.close()
    assert all(change.done() for change in changes)
    assert len(notebook.said) == GROUP + 1
    with pytest.raises(StoreFailed, match="closed"):
        writer.queue(say("late"))
    with pytest.raises(StoreFailed, match="closed"):
        await writer.carry_out(say("late"))


async def test_close_tries_once_more_and_names_what_is_lost(
    notebook: Notebook, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that is gone for good costs one last try; the log names each response that it misses."""
    monkeypatch.setattr(module, "PAUSES", (3600.0, 3600.0))
    writer = Writer(notebook)
    notebook.fault = Unavailable("gone")
    changes = [writer.queue(say("x"), name) for name in ("resp_1", "resp_2", "resp_1")]
    await until(lambda: writer.is_degraded)
    async with asyncio.timeout(120):
        await writer.close()
    assert notebook.tries == 2
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    assert all(isinstance(outcome, StoreFailed) for outcome in outcomes)
    assert "resp_1, resp_2" in caplog.text


async def test_close_in_an_outage_that_ends_loses_nothing(notebook: Notebook) -> None:
    """The last try succeeds where the database has come back."""
    writer = Writer(notebook)
    notebook.fault = Unavailable("gone")
    change = writer.queue(say("1"))
    await until(lambda: writer.is_degraded)
    notebook.fault = None
    await writer.close()
    await change
    assert notebook.said == ["1"]
