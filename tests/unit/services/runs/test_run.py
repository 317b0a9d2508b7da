from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from msgspec.structs import replace

from penstock.pipeline.errors import EngineFailed, RunInterrupted, StageError
from penstock.pipeline.frames import GenerationStarted, ItemResult, ItemTokens, Origin, ResponseStarted, with_facts
from penstock.pipeline.protocol.events import ResponseEvent, TerminalEvent, to_sse
from penstock.pipeline.protocol.response import InputTokensDetails, OutputTokensDetails, Usage
from penstock.services.runs import run as run_module
from penstock.services.runs.event_log import read_blocks
from penstock.services.runs.run import (
    COMMIT_WAIT,
    FLUSH_EVENTS,
    FLUSH_SECONDS,
    Run,
    RunRegistry,
    RunReleased,
    read_stored_log,
)
from penstock.services.store.database import Unit
from penstock.services.store.sqlite import SqliteDatabase
from penstock.services.store.store import Store, StoredResponse
from penstock.services.store.writer import PAUSES
from penstock.services.usage import TurnTokens
from tests.support import frames
from tests.support.clock import Clock
from tests.support.event_streams import checked, final
from tests.support.stored_responses import queued_response, request_of
from tests.support.stores import FaultyDatabase

Events: TypeAlias = list[ResponseEvent]

TURN = frames.whole_turn()
WAITED = frames.background_turn(TURN)
EVENTS = frames.written_events(TURN)
LAST = len(EVENTS) - 1


@pytest.fixture
def runs(store: Store) -> RunRegistry:
    return RunRegistry(store)


@pytest.fixture
async def faulty(tmp_path: Path) -> AsyncIterator[FaultyDatabase]:
    """An open database that can stall or fail."""
    database = FaultyDatabase(SqliteDatabase(tmp_path / "store.sqlite3"))
    await database.open()
    yield database
    database.is_down = False
    database.stalls.set()


@pytest.fixture
async def uneasy(faulty: FaultyDatabase) -> AsyncIterator[RunRegistry]:
    """A registry without running responses, over a store that may stall."""
    store = Store(faulty)
    yield RunRegistry(store)
    faulty.is_down = False
    faulty.stalls.set()
    await store.close()


def beginning(turn: frames.Frames = TURN, **fields: Any) -> ResponseStarted:
    """The first frame of a response, as the store gets it."""
    first = turn[0]
    assert isinstance(first, GenerationStarted)
    return ResponseStarted(replace(first.facts, response=replace(first.facts.response, **fields)))


def begun(runs: RunRegistry, events: Iterable[ResponseEvent] = (), **fields: Any) -> Run:
    run = runs.begin(beginning(**fields))
    for event in events:
        run.append(event)
    return run


async def end_with(run: Run, events: Events) -> None:
    *rest, last = events
    assert isinstance(last, TerminalEvent)
    for event in rest:
        run.append(event)
    await run.end(last)


async def events_after(run: Run, after: int = -1) -> Events:
    async with asyncio.timeout(120), aclosing(run.follow(after)) as events:
        return [event async for event in events]


async def stored_events(store: Store, response_id: str = "resp_1") -> Events:
    kept = await store.get(response_id, "")
    assert kept is not None
    return list(read_blocks(kept.response, await store.blocks(response_id)))


# Following


@pytest.mark.defect("V3")
async def test_any_number_of_readers_follow_a_run(runs: RunRegistry, clock: Clock) -> None:
    run = begun(runs)
    readers = []
    for at, event in enumerate(EVENTS[:-1]):
        readers += [asyncio.create_task(events_after(run, after)) for after in (-1, at, LAST - 1)]
        run.append(event)
        await clock.move(FLUSH_SECONDS if at % 9 == 8 else 0)  # sometimes long enough for a block to be sealed
    await end_with(run, EVENTS[-1:])
    seen = await asyncio.gather(*readers)
    assert seen[0::3] == [EVENTS] * LAST
    assert seen[1::3] == [EVENTS[at + 1 :] for at in range(LAST)]
    assert seen[2::3] == [EVENTS[LAST:]] * LAST


@pytest.mark.defect("V3")
@pytest.mark.parametrize("after", range(-1, LAST + 1))
async def test_finished_run_is_read_to_its_end(runs: RunRegistry, after: int) -> None:
    run = begun(runs)
    await end_with(run, EVENTS)
    assert [to_sse(event) for event in await events_after(run, after)] == [
        to_sse(event) for event in EVENTS[after + 1 :]
    ]


async def test_reader_beyond_the_end_gets_the_last_event(runs: RunRegistry) -> None:
    run = begun(runs, EVENTS[:9])
    run.fail(RunInterrupted())
    (last,) = await events_after(run, 50)
    assert last == replace((await events_after(run))[-1], sequence_number=51)
    assert [event async for event in read_stored_log(run.response, await runs.store.blocks("resp_1"), 50)] == [last]


async def test_end_keeps_its_number_for_a_reader_beyond_it(runs: RunRegistry) -> None:
    run = begun(runs)
    await end_with(run, EVENTS)
    assert await events_after(run, 50) == EVENTS[-1:]
    stored = read_stored_log(run.response, await runs.store.blocks("resp_1"), 50)
    assert [event async for event in stored] == EVENTS[-1:]


async def test_slow_reader_delays_no_run(runs: RunRegistry) -> None:
    run = begun(runs, EVENTS[:1])
    async with aclosing(run.follow()) as events:
        seen = [await anext(events)]
        await end_with(run, EVENTS[1:])
        assert seen + [event async for event in events] == EVENTS


async def test_reader_may_leave(runs: RunRegistry) -> None:
    run = begun(runs, EVENTS[:3])
    leaving, staying = asyncio.create_task(events_after(run)), asyncio.create_task(events_after(run))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    await end_with(run, EVENTS[3:])
    assert await staying == EVENTS


async def test_reading_a_long_log_yields_to_other_tasks(runs: RunRegistry) -> None:
    events = frames.written_events((frames.started(), *frames.message(*"word " * 1000), frames.finished()))
    run = begun(runs)
    await end_with(run, events)
    blocks = await runs.store.blocks("resp_1")
    for reading in (run.follow(), read_stored_log(run.response, blocks)):
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count())
        assert [event async for event in reading] == events
        counting.cancel()
        assert turns >= len(blocks) - 2


# What the store gets


async def test_events_are_stored_after_a_moment(runs: RunRegistry, clock: Clock) -> None:
    run = begun(runs, EVENTS[:7])
    assert await runs.store.blocks("resp_1") == ()
    await clock.move(FLUSH_SECONDS)
    assert await stored_events(runs.store) == EVENTS[:7]
    run.append(EVENTS[7])
    assert await stored_events(runs.store) == EVENTS[:7]
    await clock.move(FLUSH_SECONDS)
    assert await stored_events(runs.store) == EVENTS[:8]
    await end_with(run, EVENTS[8:])


async def test_events_of_runs_that_begin_at_different_times_are_stored_in_one_commit(
    uneasy: RunRegistry, faulty: FaultyDatabase, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = []
    for number in range(5):
        running.append(begun(uneasy, EVENTS[:1], id=f"resp_{number}"))
        await clock.move(FLUSH_SECONDS / 10)
    await uneasy.store.writer.flushed()
    commits, write = list[int](), faulty.write

    async def counted(units: Sequence[Unit]) -> list[tuple[int, ...]]:
        commits.append(len(units))
        return await write(units)

    monkeypatch.setattr(faulty, "write", counted)
    await clock.move(FLUSH_SECONDS)
    assert [await stored_events(uneasy.store, run.response.id) for run in running] == [EVENTS[:1]] * 5
    assert commits == [5]


@pytest.mark.parametrize("faults", ["fails", "ends", "is released"])
async def test_events_of_a_run_are_stored_whatever_becomes_of_the_others(
    runs: RunRegistry, clock: Clock, faults: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "FLUSHED_AT_ONCE", 1)
    other, run = begun(runs, EVENTS[:3]), begun(runs, EVENTS[:3], id="resp_2")
    errors = list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    if faults == "fails":
        monkeypatch.setattr(other.log, "seal", lambda: 1 / 0)
    elif faults == "ends":
        other.cancel()
    else:
        other.release()
    await clock.move(FLUSH_SECONDS)
    assert await stored_events(runs.store, "resp_2") == EVENTS[:3]
    assert len(errors) == (faults == "fails")
    assert (await runs.store.blocks("resp_1") == ()) == (faults != "ends")
    run.cancel()


async def test_many_events_are_stored_at_once(runs: RunRegistry) -> None:
    events = frames.written_events((frames.started(), *frames.message(*"word " * 500), frames.finished()))
    run = begun(runs, events[:FLUSH_EVENTS])
    assert await stored_events(runs.store) == events[:FLUSH_EVENTS]
    await end_with(run, events[FLUSH_EVENTS:])
    assert await stored_events(runs.store) == events


@pytest.mark.defect("V5")
async def test_finished_response_is_stored_whole(runs: RunRegistry) -> None:
    run = begun(runs)
    run.keep(ItemTokens("rs_10000", (1, 2)))
    run.keep(ItemResult("ci_10001", "7\n"))
    assert runs.get("resp_1", "") is run
    await end_with(run, EVENTS)
    kept = await runs.store.get("resp_1", "")
    tokens, results = {"rs_10000": (1, 2)}, {"ci_10001": "7\n"}
    assert kept == StoredResponse(
        final(EVENTS), frames.INPUT, tokens=tokens, results=results, writer=final(EVENTS).model
    )
    assert await stored_events(runs.store) == EVENTS
    assert len(runs) == 0


async def test_listener_that_raises_keeps_no_run_from_its_end(
    runs: RunRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Run) -> None:
        raise ZeroDivisionError

    heard = list[Run]()
    runs.at_end += [broken, heard.append]
    run = begun(runs)
    await end_with(run, EVENTS)
    assert await stored_events(runs.store) == await events_after(run) == EVENTS
    assert heard == [run]
    assert "ZeroDivisionError" in caplog.text
    assert "A listener has failed" in caplog.messages  # without what listens, which may know of all clients


@pytest.mark.defect("V25")
async def test_unstored_run_is_released_at_its_end(runs: RunRegistry) -> None:
    events = frames.written_events((frames.started(store=False), *TURN[1:]))
    run = begun(runs, store=False)
    reading = asyncio.create_task(events_after(run))
    await end_with(run, events)
    assert await reading == events
    assert len(runs) == 0
    assert await runs.store.get("resp_1", "") is None


@pytest.mark.parametrize("sealed", [0, 3])
async def test_end_of_a_log_that_is_not_stored_is_read_without_being_encoded(runs: RunRegistry, sealed: int) -> None:
    events = frames.written_events((frames.started(store=False), *TURN[1:]))
    run = begun(runs, events[:sealed], store=False)
    run.log.seal()
    await end_with(run, events)
    assert run.log.last_sealed == sealed - 1
    assert run.response == final(events)
    assert await events_after(run) == events


async def test_run_belongs_to_its_owner(runs: RunRegistry) -> None:
    run = runs.begin(with_facts(beginning(), origin=Origin("ann")))
    assert runs.get("resp_1", "ann") is run
    assert runs.get("resp_1", "") is None
    await end_with(run, EVENTS)
    assert await runs.store.get("resp_1", "") is None
    assert await runs.store.get("resp_1", "ann") is not None


# A store that stalls


async def test_end_waits_for_its_commit(uneasy: RunRegistry, faulty: FaultyDatabase, clock: Clock) -> None:
    faulty.stalls.clear()
    run = begun(uneasy)
    reading, ending = asyncio.create_task(events_after(run)), asyncio.create_task(end_with(run, EVENTS))
    await clock.move(COMMIT_WAIT * 0.9)
    assert not reading.done()
    assert not ending.done()
    faulty.stalls.set()
    await ending
    assert await reading == EVENTS
    assert await stored_events(uneasy.store) == EVENTS


async def test_begin_of_a_queued_response_waits_for_its_commit(
    uneasy: RunRegistry, faulty: FaultyDatabase, clock: Clock
) -> None:
    """A server that finds it queued would run it again."""
    queued = StoredResponse(replace(beginning().facts.response, status="queued"), frames.INPUT)
    run = uneasy.queue(queued)
    faulty.stalls.clear()
    assert uneasy.begin(beginning()) is run
    waiting = asyncio.create_task(run.committed())
    await clock.move(COMMIT_WAIT * 0.9)
    assert not waiting.done()
    faulty.stalls.set()
    await waiting


@pytest.mark.parametrize("fault", ["stalls", "is down"])
async def test_end_waits_for_the_store_for_a_bounded_time(
    uneasy: RunRegistry, faulty: FaultyDatabase, fault: str, clock: Clock
) -> None:
    faulty.is_down = fault == "is down"
    if fault == "stalls":
        faulty.stalls.clear()
    run = begun(uneasy)
    reading, ending = asyncio.create_task(events_after(run)), asyncio.create_task(end_with(run, EVENTS))
    await clock.move(COMMIT_WAIT * 0.9)
    assert not ending.done()
    await clock.move(COMMIT_WAIT * 0.1)
    await ending
    assert await reading == EVENTS
    assert uneasy.get("resp_1", "") is run
    assert run.response == final(EVENTS)
    faulty.is_down = False
    faulty.stalls.set()
    await clock.move(PAUSES[1])
    assert await stored_events(uneasy.store) == EVENTS
    assert len(uneasy) == 0


# Interrupted runs


@dataclass
class Counted:
    """A turn that is being generated."""

    tokens: TurnTokens

    def tokens_so_far(self) -> TurnTokens:
        return self.tokens


def end_early(run: Run, error: StageError | None) -> None:
    if error is None:
        run.cancel()
    else:
        run.fail(error)


@pytest.mark.defect("V1", "V2")
@pytest.mark.parametrize("upto", [0, 1, 2, 5, 8, 12, LAST])
@pytest.mark.parametrize(("error", "status"), [(EngineFailed("It died."), "failed"), (None, "cancelled")])
async def test_run_ended_early_has_a_terminal_event(
    runs: RunRegistry, upto: int, error: StageError | None, status: str
) -> None:
    run = begun(runs, EVENTS[:upto])
    reading = asyncio.create_task(events_after(run))
    await asyncio.sleep(0)
    end_early(run, error)
    assert run.ended
    received = checked(await reading)
    assert received[:upto] == EVENTS[:upto]
    assert final(received) == run.response
    assert (run.response.status, run.response.usage) == (status, None)
    assert await stored_events(runs.store) == received
    assert len(runs) == 0


async def test_cancelled_run_has_the_tokens_counted_so_far(runs: RunRegistry) -> None:
    """The tally may be older than the run, and another response does not count."""
    tallies = [runs.tallies.of(name) for name in ("resp_1", "resp_2")]
    run = begun(runs, EVENTS[:8])
    for tally, output in zip(tallies, (5, 70), strict=True):
        tally.begin(Counted(TurnTokens(9, 3, output, 2)), lists_turns=False)
    run.cancel()
    received = checked(await events_after(run))
    assert final(received).usage == Usage(9, InputTokensDetails(3), 5, OutputTokensDetails(2), 14)
    assert await stored_events(runs.store) == received


@pytest.mark.defect("B22")
async def test_events_after_the_end_are_ignored(runs: RunRegistry) -> None:
    run = begun(runs, EVENTS[:9])
    run.cancel()
    received = await events_after(run)
    run.fail(EngineFailed("too late"))
    await end_with(run, EVENTS[9:])
    assert await events_after(run) == received
    assert await stored_events(runs.store) == received
    assert run.response.status == "cancelled"


async def test_end_of_a_run_can_be_awaited(runs: RunRegistry) -> None:
    run = begun(runs)
    waiting = asyncio.create_task(run.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    run.cancel()
    await asyncio.wait_for(waiting, 120)


# In the background


async def accepted(runs: RunRegistry) -> Run:
    waiting = queued_response(created_at=1_800_000_000)
    await runs.store.accept(waiting, request_of(waiting))
    return runs.queue(waiting)


@pytest.mark.defect("B21")
async def test_queued_response_begins_later(runs: RunRegistry) -> None:
    run = await accepted(runs)
    events = frames.written_events(WAITED)
    reading = asyncio.create_task(events_after(run))
    await asyncio.sleep(0)
    assert (runs.queued, runs.running) == ((run,), ())
    assert runs.begin(beginning(WAITED)) is run
    assert (runs.queued, runs.running) == ((), (run,))
    assert run.response.status == "in_progress"
    await end_with(run, events)
    assert frames.event_types(events)[:3] == ["created", "queued", "in_progress"]
    assert await reading == events
    assert await stored_events(runs.store) == events


async def test_queued_response_has_no_stored_log(runs: RunRegistry, clock: Clock) -> None:
    await accepted(runs)
    await clock.move(2 * FLUSH_SECONDS)
    assert await runs.store.blocks("resp_1") == ()


@pytest.mark.defect("V1")
@pytest.mark.parametrize(("error", "status"), [(RunInterrupted(), "failed"), (None, "cancelled")])
async def test_queued_response_can_be_ended(runs: RunRegistry, error: StageError | None, status: str) -> None:
    run = await accepted(runs)
    end_early(run, error)
    received = checked(await events_after(run))
    assert frames.event_types(received) == ["created", "queued", "failed" if error else "incomplete"]
    assert final(received).status == status
    assert await stored_events(runs.store) == received


async def test_response_cancelled_in_the_queue_does_not_begin(runs: RunRegistry) -> None:
    run = await accepted(runs)
    run.cancel()
    assert runs.begin(beginning(WAITED)) is run
    kept = await runs.store.get("resp_1", "")
    assert kept is not None
    assert kept.response.status == run.response.status == "cancelled"


@pytest.mark.defect("V2")
async def test_readers_of_a_released_run_are_redirected(runs: RunRegistry) -> None:
    run = await accepted(runs)
    reading = asyncio.create_task(events_after(run))
    await asyncio.sleep(0)
    run.release()
    with pytest.raises(RunReleased):
        await reading
    await asyncio.wait_for(run.wait(), 120)
    assert len(runs) == 0
    await end_with(run, EVENTS)
    run.cancel()
    kept = await runs.store.get("resp_1", "")
    assert kept is not None
    assert kept.response.status == "queued"


async def test_finished_run_is_not_released(runs: RunRegistry) -> None:
    run = await accepted(runs)
    run.cancel()
    run.release()
    assert frames.event_types(await events_after(run)) == ["created", "queued", "incomplete"]


@pytest.mark.defect("V1")
async def test_run_of_a_dead_server_is_ended(runs: RunRegistry, clock: Clock) -> None:
    head = begun(runs, EVENTS[:9])
    await clock.move(FLUSH_SECONDS)
    runs.discard(head)
    kept, blocks = await runs.store.get("resp_1", ""), await runs.store.blocks("resp_1")
    assert kept is not None
    runs.adopt(kept, blocks).fail(RunInterrupted())
    received = checked(await stored_events(runs.store))
    assert received[:9] == EVENTS[:9]
    assert final(received).status == "failed"
    assert len(runs) == 0
