from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pipeline.core import Pipeline
from pipeline.errors import StoreFailed
from pipeline.frames import EmittedFrame, GenerationStarted
from pipeline.protocol.events import (
    OutputTextDelta,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    TerminalEvent,
)
from pipeline.protocol.items import InputText, Item, Message
from pipeline.protocol.response import ErrorDetails, IncompleteDetails
from stages.persist.persist import Persist
from stages.persist.sqlite import SqliteStore
from stages.persist.store import ResponseStore, StoredResponse
from tests.stages.persist.samples import response

INPUT = (Message("msg_in", "completed", "user", (InputText("hello"),)),)


@dataclass
class FullStore:
    """A store with room for nothing."""

    asked: list[StoredResponse] = field(default_factory=list)

    async def put(self, stored: StoredResponse) -> None:
        self.asked.append(stored)
        raise StoreFailed("The response could not be stored.")

    async def get(self, response_id: str) -> StoredResponse | None:
        return None

    async def chain(self, response_id: str) -> tuple[StoredResponse, ...]:
        return ()

    async def items(self, ids: Sequence[str]) -> dict[str, Item]:
        return {}

    async def delete(self, response_id: str) -> bool:
        return False

    async def close(self) -> None:
        pass


async def stream(end: ResponseEvent, *, store: bool = True) -> AsyncGenerator[EmittedFrame, None]:
    """What emit makes of a short answer."""
    started = response(status="in_progress", completed_at=None, output=(), store=store)
    yield GenerationStarted(started, INPUT, prompt_tokens=7)
    yield ResponseCreated(sequence_number=0, response=started)
    yield ResponseInProgress(sequence_number=1, response=started)
    for number, delta in enumerate(["Hel", "lo!"], start=2):
        yield OutputTextDelta(
            sequence_number=number, item_id="msg_resp_1", output_index=0, content_index=0, delta=delta
        )
    yield end


async def persisted(store: ResponseStore, source: AsyncGenerator[EmittedFrame, None]) -> list[ResponseEvent]:
    """All that comes out of the stage."""
    async with Pipeline.start("persist", Persist(store)).open(source) as events:
        return [event async for event in events]


INCOMPLETE: dict[str, Any] = {
    "status": "incomplete",
    "incomplete_details": IncompleteDetails("max_output_tokens"),
    "completed_at": None,
}
FAILED: dict[str, Any] = {
    "status": "failed",
    "error": ErrorDetails("server_error", "The engine is gone."),
    "completed_at": None,
}
ENDS: list[TerminalEvent] = [
    ResponseCompleted(sequence_number=4, response=response()),
    ResponseIncomplete(sequence_number=4, response=response(**INCOMPLETE)),
    ResponseFailed(sequence_number=4, response=response(**FAILED)),
]


@pytest.mark.parametrize("end", ENDS)
async def test_a_response_is_stored_with_its_input(store: SqliteStore, end: TerminalEvent) -> None:
    """However a response ends, it is kept as its terminal event shows it, and every event passes unchanged."""
    events = await persisted(store, stream(end))
    assert events == [event async for event in stream(end) if not isinstance(event, GenerationStarted)]
    assert await store.get("resp_1") == StoredResponse(end.response, INPUT)


async def test_the_end_is_seen_only_once_it_is_stored(store: SqliteStore) -> None:
    """A client that asks for the response at the terminal event finds it, and nothing before."""
    async with Pipeline.start("persist", Persist(store)).open(stream(ENDS[0])) as events:
        found = [await store.get("resp_1") is not None async for _ in events]
    assert found == [False, False, False, False, True]


async def test_store_false_keeps_nothing() -> None:
    """A response that asks not to be stored never reaches the store."""
    full = FullStore()
    end = ResponseCompleted(sequence_number=4, response=response(store=False))
    events = await persisted(full, stream(end, store=False))
    assert events[-1] == end
    assert full.asked == []


async def test_a_store_that_fails_fails_the_response(caplog: pytest.LogCaptureFixture) -> None:
    """A response that cannot be kept ends in exactly one response.failed, under the number of the end it replaces."""
    end = ResponseIncomplete(sequence_number=4, response=response(**INCOMPLETE))
    with caplog.at_level(logging.ERROR):
        events = await persisted(FullStore(), stream(end))
    assert [event.sequence_number for event in events] == [0, 1, 2, 3, 4]
    assert isinstance(events[-1], ResponseFailed)
    assert events[-1].response == response(
        status="failed",
        error=ErrorDetails("server_error", "The response could not be stored."),
        completed_at=None,
        incomplete_details=None,
    )
    assert not any(isinstance(event, ResponseCompleted | ResponseIncomplete | ResponseFailed) for event in events[:-1])
    assert "resp_1" in caplog.text


async def test_a_failed_response_keeps_its_own_error() -> None:
    """When what failed already cannot be stored either, the client is told of the first failure."""
    events = await persisted(FullStore(), stream(ENDS[2]))
    assert events[-1] == ENDS[2]
    assert len(events) == 5


async def test_deltas_do_not_wait_for_the_store() -> None:
    """The store is asked once per response, at its end."""
    full = FullStore()
    async with Pipeline.start("persist", Persist(full)).open(stream(ENDS[0])) as events:
        async for event in events:
            if not isinstance(event, ResponseFailed):
                assert full.asked == []
    assert len(full.asked) == 1
