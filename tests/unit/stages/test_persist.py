from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline import frames
from penstock.pipeline.core import Pipeline, Stage
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.lifecycle.rules import InvariantBroken
from penstock.pipeline.protocol.events import Event, ResponseEvent, TerminalEvent
from penstock.services.runs.event_log import read_blocks
from penstock.services.runs.run import COMMIT_WAIT, RunRegistry
from penstock.services.store.sqlite import SqliteDatabase
from penstock.services.store.store import Store, StoredResponse
from penstock.services.store.writer import PAUSES
from penstock.stages.emit.emit import Emit
from penstock.stages.persist import Persist
from tests.support.clock import Clock
from tests.support.event_streams import checked, final
from tests.support.frames import (
    INPUT,
    Frames,
    background_turn,
    finished,
    frame_source,
    message,
    started,
    whole_turn,
    written_events,
)
from tests.support.stores import FaultyDatabase

TURN = whole_turn()
EVENTS = written_events(TURN)
CUT: Frames = (started(), *message("Hel", complete=False))


@pytest.fixture
def live(store: Store) -> RunRegistry:
    return RunRegistry(store)


def stream(
    live: RunRegistry,
    sequence: AsyncGenerator[frames.ConversedFrame, None],
    *between: Stage[frames.EmittedFrame, frames.EmittedFrame],
) -> AbstractAsyncContextManager[AsyncIterator[ResponseEvent]]:
    """The output of the stage; the stages ``between`` run before it and after ``emit``."""
    pipeline = Pipeline.start("emit", Emit())
    for number, stage in enumerate(between):
        pipeline = pipeline.then(f"between {number}", stage)
    return pipeline.then("persist", Persist(live)).open(sequence)


async def persisted(
    live: RunRegistry, sequence: Iterable[frames.ConversedFrame], error: Exception | None = None
) -> list[ResponseEvent]:
    async with stream(live, frame_source(sequence, error)) as events:
        return checked([event async for event in events])


async def kept(store: Store) -> tuple[StoredResponse, list[ResponseEvent]]:
    stored = await store.get("resp_1", "")
    assert stored is not None
    return stored, list(read_blocks(stored.response, await store.blocks("resp_1")))


async def endless(sequence: Iterable[frames.ConversedFrame]) -> AsyncGenerator[frames.ConversedFrame, None]:
    """A turn that hangs after these frames."""
    for frame in sequence:
        yield frame
    await asyncio.Event().wait()


# Ends of a response


@pytest.mark.defect("B21", "B22")
@pytest.mark.parametrize("reason", ["stop", "length", "content_filter", "cancelled"])
async def test_ended_response_is_stored_with_input_and_log(live: RunRegistry, reason: frames.FinishReason) -> None:
    sequence = (*CUT, finished(reason)) if reason != "stop" else TURN
    events = await persisted(live, sequence)
    assert events == written_events(sequence)
    assert await kept(live.store) == (StoredResponse(final(events), INPUT, writer="tiny-gpt-oss"), events)
    assert final(events).usage is not None


@pytest.mark.defect("V1", "B21")
async def test_failed_background_response_is_stored(live: RunRegistry) -> None:
    events = await persisted(live, background_turn(CUT), EngineFailed("It died."))
    stored, log = await kept(live.store)
    assert stored.response == final(events)
    assert (stored.response.status, stored.response.background) == ("failed", True)
    assert log == events


async def test_end_is_sent_after_it_is_stored(live: RunRegistry) -> None:
    async with stream(live, frame_source(TURN)) as events:
        statuses = [(await kept(live.store))[0].response.status async for _ in events]
    assert statuses == ["in_progress"] * (len(EVENTS) - 1) + ["completed"]


async def test_tokens_are_stored_and_not_sent(live: RunRegistry) -> None:
    thought = (frames.ReasoningOpened(), frames.ItemDelta("So."), frames.ItemClosed(complete=True, token_ids=(1, 2)))
    events = await persisted(live, (started(), *thought, *message("Hello!"), finished()))
    assert all(isinstance(event, Event) for event in events)
    assert (await kept(live.store))[0].tokens == {"rs_10000": (1, 2)}


async def test_results_are_stored_and_not_sent(live: RunRegistry) -> None:
    async def running(source: AsyncIterator[frames.EmittedFrame]) -> AsyncGenerator[frames.EmittedFrame, None]:
        async for frame in source:
            if isinstance(frame, TerminalEvent):
                yield frames.ItemResult("ci_10001", "half a pair \ud800, NUL \0")
            yield frame

    async with stream(live, frame_source(TURN), running) as events:
        assert [event async for event in events] == EVENTS
    assert (await kept(live.store))[0].results == {"ci_10001": "half a pair \ud800, NUL \0"}


async def test_store_false_keeps_nothing(live: RunRegistry) -> None:
    events = await persisted(live, (started(store=False), *TURN[1:]))
    assert final(events).status == "completed"
    assert await live.store.get("resp_1", "") is None
    assert len(live) == 0


# Ways to leave the stage


@pytest.mark.defect("B23")
async def test_cancelled_task_leaves_a_cancelled_response(live: RunRegistry) -> None:
    seen = asyncio.Event()

    async def consume() -> None:
        async with stream(live, endless(CUT[:3])) as events:
            async for _ in events:
                seen.set()

    consuming = asyncio.create_task(consume())
    await seen.wait()
    consuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consuming
    await settled(live, "cancelled")


async def test_closed_stream_leaves_a_cancelled_response(live: RunRegistry) -> None:
    async with stream(live, endless(CUT[:3])) as events:
        for _ in range(5):
            await anext(events)
    await settled(live, "cancelled")


@pytest.mark.defect("V1")
async def test_bug_after_emit_leaves_a_failed_response(live: RunRegistry) -> None:
    async def broken(source: AsyncIterator[frames.EmittedFrame]) -> AsyncGenerator[frames.EmittedFrame, None]:
        async for frame in source:
            if isinstance(frame, TerminalEvent):
                raise ZeroDivisionError
            yield frame

    async with stream(live, frame_source(TURN), broken) as events:
        with pytest.raises(ZeroDivisionError):
            [event async for event in events]
    response = await settled(live, "failed")
    assert response.error is not None
    assert "Internal error" in response.error.message


async def test_stream_without_an_end_leaves_a_failed_response(live: RunRegistry) -> None:
    async def losing(source: AsyncIterator[frames.EmittedFrame]) -> AsyncGenerator[frames.EmittedFrame, None]:
        async for frame in source:
            if not isinstance(frame, TerminalEvent):
                yield frame

    async with stream(live, frame_source(TURN), losing) as events:
        with pytest.raises(InvariantBroken, match="ends with a terminal event"):
            [event async for event in events]
    await settled(live, "failed")


async def test_lost_beginning_is_a_bug(live: RunRegistry) -> None:
    async def late() -> AsyncGenerator[frames.EmittedFrame, None]:
        for event in EVENTS:
            yield event

    with pytest.raises(TypeError, match="begins with has been lost"):
        await anext(Persist(live)(late()))
    assert len(live) == 0


@pytest.mark.defect("B22")
async def test_broken_off_run_stops_the_stage(live: RunRegistry) -> None:
    async with stream(live, frame_source(TURN)) as events:
        seen = [await anext(events) for _ in range(5)]
        (run,) = live
        run.cancel()
        assert [event async for event in events] == []
    assert seen == EVENTS[:5]
    await settled(live, "cancelled")


async def settled(live: RunRegistry, status: str) -> Any:
    """Assert that log and store have the same end with this status, and that no run is live; return the response."""
    stored, log = await kept(live.store)
    assert stored.response.status == status
    assert final(checked(log)) == stored.response
    assert stored.input == INPUT
    assert len(live) == 0
    return stored.response


# A store that is out of reach


async def test_created_response_is_stored_before_it_is_sent(tmp_path: Path) -> None:
    """A server may be killed as soon as a client knows the id, and the next one must find the response."""
    database = FaultyDatabase(SqliteDatabase(tmp_path / "store.sqlite3"))
    store = Store(database)
    await store.open()
    database.stalls.clear()
    async with stream(RunRegistry(store), frame_source(TURN)) as events:
        created = asyncio.ensure_future(anext(events))
        while not store.backlog:
            await asyncio.sleep(0)
        assert not created.done()
        database.stalls.set()
        assert await created == EVENTS[0]
        assert await database.read("select id from responses") == [("resp_1",)]
        assert [event async for event in events] == EVENTS[1:]
    await store.close()


@pytest.mark.parametrize("fault", ["stalls", "is down"])
async def test_only_beginning_and_end_wait_for_the_store(tmp_path: Path, fault: str, clock: Clock) -> None:
    database = FaultyDatabase(SqliteDatabase(tmp_path / "store.sqlite3"))
    store = Store(database)
    await store.open()
    database.is_down = fault == "is down"
    if fault == "stalls":
        database.stalls.clear()
    sequence = (started(), *message(*"word " * 2000), finished())
    passed, expected = list[ResponseEvent](), written_events(sequence)

    async def consume() -> None:
        async with stream(RunRegistry(store), frame_source(sequence)) as events:
            async for event in events:
                passed.append(event)
                await asyncio.sleep(0)  # for the store to try

    consuming = asyncio.create_task(consume())
    await clock.move(COMMIT_WAIT)
    while len(passed) < len(expected) - 1:
        await asyncio.sleep(0)
    await clock.move(COMMIT_WAIT * 0.9)
    assert passed == expected[:-1]
    await clock.move(COMMIT_WAIT * 0.1)
    await consuming
    assert passed == expected
    database.is_down = False
    database.stalls.set()
    await clock.move(PAUSES[1])
    stored, log = await kept(store)
    assert (stored.response, log) == (final(passed), passed)
    await store.close()
