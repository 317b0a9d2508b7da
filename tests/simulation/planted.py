"""Faults that this project once had, or nearly had, each put back by a small change: a simulation must find them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from penstock.api.runs.scheduler import Scheduler
from penstock.pipeline.lifecycle.outcome import last_event
from penstock.pipeline.protocol.events import ResponseFailed, ResponseIncomplete
from penstock.stages.services.runs import run as runs
from penstock.stages.services.runs.run import Run, RunRegistry
from penstock.stages.services.store import statements
from penstock.stages.services.store.key_limits import StoredReservations
from penstock.stages.services.store.store import Store

Fault = AbstractContextManager[Any]


def lost_ids() -> Fault:
    """Send the id of a response before it is stored: a killed server loses it."""
    begin = RunRegistry.begin

    def begun(registry: RunRegistry, started: Any) -> Run:
        run = begin(registry, started)
        run._commit = None
        return run

    return patch.object(RunRegistry, "begin", begun)


def further_readers() -> Fault:
    """Give a reader who was further than its killed server had stored an end with a number that it has seen."""

    def end_for(after: int, last: int, response: Any) -> Iterator[Any]:
        if after > last:
            yield last_event(last, response)

    return patch.object(runs, "_end_for", end_for)


def early_cancels() -> Fault:
    """Answer a cancel before it is stored: after a kill the response has another end."""

    async def not_awaited(_: Run) -> None:
        """Return at once."""

    cancel = Scheduler.cancel

    async def cancelled(scheduler: Scheduler, run: Run) -> Any:
        with patch.object(run, "committed", not_awaited.__get__(run)):
            return await cancel(scheduler, run)

    return patch.object(Scheduler, "cancel", cancelled)


def other_owners() -> Fault:
    """Let each owner find the running responses of all."""
    return patch.object(RunRegistry, "get", lambda registry, response_id, _: registry._runs.get(response_id))


def double_ends() -> Fault:
    """Send the last event of a response again if it is not completed."""
    in_foreground = Scheduler._in_foreground

    async def doubled(scheduler: Scheduler, *arguments: Any) -> AsyncGenerator[Any, None]:
        event: Any = None
        async for event in in_foreground(scheduler, *arguments):
            yield event
        if isinstance(event, ResponseIncomplete | ResponseFailed):
            yield event

    return patch.object(Scheduler, "_in_foreground", doubled)


def locked_conversations() -> Fault:
    """Keep the lock of a conversation whose response was refused."""
    return patch.object(Scheduler, "_unlocking", lambda *_: contextmanager(_nothing)())


def own_counts() -> Fault:
    """Have each server count the responses of a key alone."""

    async def reserve(_: Any, __: str, ___: str, count: int, most: int) -> bool:
        return count <= most

    return patch.object(StoredReservations, "reserve", reserve)


def refused_runs() -> Fault:
    """Leave a response in the queue of the store although its client was refused."""
    queue = Store._queue

    def queued(store: Store, stored: Any, changes: Any) -> Any:
        is_withdrawal = isinstance(changes, list) and [each.sql for each in changes] == [*statements.WITHDRAWAL]
        return None if is_withdrawal else queue(store, stored, changes)

    return patch.object(Store, "_queue", queued)


def _nothing() -> Iterator[None]:
    yield


PLANTED: dict[str, tuple[Callable[[], Fault], tuple[str, ...]]] = {
    "lost-ids": (lost_ids, ("ask", "strike")),
    "further-readers": (further_readers, ("ask", "read", "strike", "doom")),
    "early-cancels": (early_cancels, ("ask", "cancel", "strike")),
    "other-owners": (other_owners, ("ask", "snoop")),
    "double-ends": (double_ends, ("ask", "cancel")),
    "locked-conversations": (locked_conversations, ("talk",)),
    "own-counts": (own_counts, ("ask", "burst")),
    "refused-runs": (refused_runs, ("ask", "lost commits")),
}

"""The faults by name, each with the kinds of actions that find it soon."""


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Put a fault back for the length of a block, if there is a name."""
    if name is None:
        yield
        return
    fault, _ = PLANTED[name]
    with fault():
        yield
