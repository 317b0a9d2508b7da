"""The runs of this process: one per response, each with an event log that any number of readers can follow.

The writer never waits: it appends events, and about four times a second the new ones go to the store as one block.
The blocks of all runs go together, as a commit costs more than all of them.
Only the beginning and the end of a run wait for their commits, for at most `COMMIT_WAIT` seconds each.

A run ends in one of three ways.  Its pipeline ends it with a terminal event (`Run.end`).  It is cancelled or fails by
another hand than ``emit``'s (`Run.cancel`, `Run.fail`), and its log derives the missing events.  Or it is released to
another server (`Run.release`), and goes on there.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Literal, TypeAlias

from msgspec.structs import replace

from penstock.pipeline.errors import RunInterrupted, ServerStopping
from penstock.pipeline.frames import ItemResult, ItemTokens, ResponseStarted, TokenIds
from penstock.pipeline.lifecycle.outcome import last_event
from penstock.pipeline.lifecycle.rules import rule
from penstock.pipeline.protocol.events import ResponseEvent, TerminalEvent
from penstock.pipeline.protocol.light import are_light
from penstock.pipeline.protocol.response import Response
from penstock.services.listeners import tell
from penstock.services.runs.event_log import Block, EventLog, LogReader, read_blocks
from penstock.services.runs.response_metrics import count_response
from penstock.services.store.store import Store, StoredResponse
from penstock.services.tracing import store_span
from penstock.services.usage import Tallies
from penstock.services.use import use_of

FLUSH_SECONDS = 0.25
"""Maximum seconds before an event goes to the store."""

FLUSH_EVENTS = 1024
"""Maximum events in memory before they go to the store.  With a token each, they are about 4 KB of text."""

FLUSHED_AT_ONCE = 256
"""The runs whose events go to the store in one turn of the event loop: a few milliseconds."""

EVENTS_AT_ONCE = 256
"""Events of a stored log to decode before other tasks may run."""

COMMIT_WAIT = 1.0
"""Maximum seconds that the beginning or the end of a run waits for its commit."""


Mode: TypeAlias = Literal["sync", "stream", "background", "websocket"]
"""The way in which a client gets a response, as the metrics name it."""


class RunReleased(ServerStopping):
    """The response was queued or running here, and is left to another server."""


class Run:
    """The run of one response.

    ``response`` is the response as it began, then the final one.  ``tokens`` and ``results`` belong to its output items
    so far, by item id.  Once the run has ``ended``, it ignores further events.
    """

    def __init__(
        self, stored: StoredResponse, registry: RunRegistry, log: EventLog, commit: asyncio.Future[None] | None
    ) -> None:
        self.response = stored.response
        self.input = stored.input
        self.origin = stored.origin
        self.tokens: dict[str, TokenIds] = {}
        self.results = dict(stored.results)
        self.ended = False
        self.is_steered = False
        """True if the client wants it to end as soon as that breaks nothing."""
        self.mode: Mode = "background" if stored.response.background else "stream"
        self.began = time.monotonic()
        self.trace_headers: Mapping[str, str] = {}
        """The headers of W3C Trace Context that name its span, once it has begun; else those of its client."""
        self._registry = registry
        self.log = log
        self._tally = registry.tallies.of(stored.response.id)
        self._next = log.next_number
        self._released = False
        self._news: asyncio.Event | None = None  # created by the first waiting reader, as most runs have none
        self._closed = False  # ended, and no longer waiting for the commit
        self._is_due = False  # the registry will flush it
        self._commit = commit  # of the beginning, then of the end

    @property
    def model(self) -> str:
        """The name of its model, as the engine serves it."""
        return self.origin.model or self.response.model

    @property
    def tool_seconds(self) -> float:
        """Seconds for which this server has run tools for it."""
        return self._tally.tool_seconds

    # Writing

    @property
    def event_count(self) -> int:
        """The number of events so far."""
        return self.log.next_number

    def append(self, event: ResponseEvent) -> bool:
        """Append the next event; return False if it was ignored.

        An event is ignored if the log has it already, or the run has ended.  A gap in the sequence numbers raises
        `InvariantBroken`.
        """
        number = event.sequence_number
        if number != self._next:
            return self._skip(event)
        self._next = number + 1
        fresh = self.log.fresh
        fresh.append(event)
        if not self._is_due:
            self._is_due = True
            self._registry.flush_later(self)
        elif len(fresh) == FLUSH_EVENTS:
            self._flush()
        if self._news is not None:
            self._wake()
        return True

    def _skip(self, event: ResponseEvent) -> bool:
        rule(
            event.sequence_number < self._next, "sequence numbers count from 0 without gaps: a stage has lost an event"
        )
        return False

    def keep(self, frame: ItemTokens | ItemResult) -> None:
        """Keep an item's token ids or tool result, which are stored but not sent to clients."""
        if isinstance(frame, ItemTokens):
            self.tokens[frame.item_id] = frame.token_ids
        else:
            self.results[frame.item_id] = frame.result

    async def end(self, event: TerminalEvent) -> None:
        """Append the last event, and wait up to `COMMIT_WAIT` seconds for its commit.

        A client that has received the end may retrieve the response at once, so it should be stored by then.
        """
        if event.sequence_number != self._next:
            self._skip(event)
            return
        self.log.append(event)
        try:
            block = self.log.seal() if self.response.store else None  # readers take the events as they are
            self._end(block, event.response)
            await self.committed()
        finally:  # the store may be closed, or this task cancelled while it waits: readers would wait for ever
            self._close()

    def cancel(self) -> None:
        """End the run as cancelled, unless it has ended.  Its usage is what was counted until now.

        Later events of its pipeline are ignored.  The end is stored without waiting for the commit.
        """
        self._end_early(None)

    def fail(self, error: Exception) -> None:
        """End the run as failed with ``error``, unless it has ended; otherwise like `cancel`."""
        self._end_early(error)

    def _end_early(self, error: Exception | None) -> None:
        if self.ended:
            return
        try:
            block = self.log.end_early(error, self._tally.usage(), self._tally.generations())
            self._end(block, self.log.response)
        finally:
            self._close()

    async def committed(self) -> None:
        """Wait up to `COMMIT_WAIT` seconds for the commit of the beginning or the end, if one is under way."""
        if self._commit is not None and not self._commit.done():
            with store_span("store commit", self.trace_headers):
                await asyncio.wait([self._commit], timeout=COMMIT_WAIT)
        if self._commit is not None and self._commit.done():
            self._commit = None  # else it stays as long as the response

    def start(self) -> None:
        """Mark a queued response as in progress, unless it has ended in the queue.

        Its next event waits for the commit: a server that found it queued would run it again.
        """
        if self.ended:
            return
        self.response = replace(self.response, status="in_progress")
        store = self._registry.store
        is_awaited, commit = not store.is_degraded, store.start(self.response)
        self._commit = commit if is_awaited else None

    def release(self) -> None:
        """Leave the response to another server unless it has ended.  Its readers here get `RunReleased`."""
        if self.ended:
            return
        self._released = True
        self._stop()
        self._close()
        self._registry.discard(self)

    # Reading

    async def follow(self, after: int = -1) -> AsyncGenerator[ResponseEvent, None]:
        """Yield the events after sequence number ``after``, including future ones.

        Raises `RunReleased` if the response is left to another server.  A reader past the end gets the terminal event.
        """
        reader = LogReader(self.log, after)
        while True:
            for event in reader.read():
                if self.ended and isinstance(event, TerminalEvent):
                    await self.wait()
                yield event
            if reader.is_behind:
                await asyncio.sleep(0)
            elif self._released:
                raise RunReleased
            elif self.ended:
                break
            else:
                await self._wait_for_news()
        for event in _end_for(after, self.log.last_number, self.response):
            yield event

    async def wait(self) -> None:
        """Wait until the run has ended and no longer waits for its commit."""
        while not self._closed:
            await self._wait_for_news()

    async def _wait_for_news(self) -> None:
        self._news = self._news or asyncio.Event()
        await self._news.wait()

    # Storing

    def flush(self) -> None:
        """Pass the fresh events to the store as a block, without waiting; do nothing after the end."""
        self._is_due = False
        if not self.ended:
            self._flush()

    def _flush(self) -> None:
        block = self.log.seal()
        if block is not None and self.response.store:
            self._registry.store.append(self.response.id, block)

    def _end(self, block: Block | None, response: Response) -> None:
        self.response = response
        self._stop()
        self._commit = self._registry.end(self, block)

    def _stop(self) -> None:
        self.ended, self._next = True, sys.maxsize
        self._wake()

    def _close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.set()


class RunRegistry:
    """The runs of this process by response id, until they have ended and their end is saved in ``store``.

    With ``measures_keys``, the metrics tell the API keys of responses apart.
    """

    def __init__(self, store: Store, *, measures_keys: bool = False) -> None:
        self.store = store
        self.at_end: list[Callable[[Run], None]] = []
        """Called with each run that has ended."""
        self.tallies = Tallies()
        """The tokens of the responses that run."""
        self._measures_keys = measures_keys
        self._runs: dict[str, Run] = {}
        self._due = deque[Run]()
        """Runs with fresh events."""

    def __iter__(self) -> Iterator[Run]:
        return iter(tuple(self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def queued(self) -> tuple[Run, ...]:
        return tuple(run for run in self if run.response.status == "queued")

    @property
    def running(self) -> tuple[Run, ...]:
        return tuple(run for run in self if run.response.status == "in_progress")

    def get(self, response_id: str, owner: str) -> Run | None:
        """Return the run of a response, or None if it is not here or belongs to another owner."""
        run = self._runs.get(response_id)
        return run if run is not None and run.origin.owner == owner else None

    def is_accepted(self, response_id: str) -> bool:
        """Return True if a response has begun or is queued: it can no longer be refused."""
        return response_id in self._runs

    def is_steered(self, response_id: str) -> bool:
        """Return True if a response is steered."""
        run = self._runs.get(response_id)
        return run is not None and run.is_steered

    def queue(self, stored: StoredResponse) -> Run:
        """Add a response from the store's queue, with the first events of its log up to ``response.queued``.

        Its input stays in the store until the run begins, because many responses may be queued.
        """
        log = EventLog(stored.response)
        log.begin()
        return self._add(replace(stored, input=()), log)

    def begin(self, started: ResponseStarted) -> Run:
        """Return the run of a response that begins, new or from the queue, without waiting for the store."""
        facts = started.facts
        run = self._runs.get(facts.response_id)
        if run is not None:
            run.input, run.results, run.origin = facts.input, dict(facts.results), facts.origin
            run.trace_headers = facts.scheduling.trace_headers
            run.start()
            return run
        stored = StoredResponse(facts.response, facts.input, facts.origin, results=facts.results)
        commit = self.store.begin(stored) if stored.response.store else None
        is_awaited = not self.store.is_degraded  # during an outage no stream waits
        run = self._add(stored, EventLog(stored.response), commit if is_awaited else None)
        run.trace_headers = facts.scheduling.trace_headers
        return run

    def adopt(self, stored: StoredResponse, blocks: Iterable[Block]) -> Run:
        """Add the stored part of a run whose server died, to end it here."""
        return self._add(stored, EventLog(stored.response, blocks))

    def end(self, run: Run, block: Block | None) -> asyncio.Future[None] | None:
        """Store the end of a run, which stays here until that is saved, and what it has used.

        The line of a batch is counted with its result, and not here.  Returns None if nothing is stored.
        """
        key = (run.origin.key_name or run.origin.owner[:8]) if self._measures_keys else ""
        tell(self.at_end, run)
        self.store.recent_calls.keep(run.response.output, run.origin.owner, run.model, run.tokens)
        count_response(run.response, run.model, run.mode, time.monotonic() - run.began, key)
        use = None if run.origin.line else partial(use_of, run)
        if not run.response.store:
            self.discard(run)
            return self.store.used(use() if are_light(run.input) else use) if use else None
        saved = self.store.end(
            StoredResponse(
                run.response,
                input=run.input,
                origin=run.origin,
                tokens=run.tokens,
                results=run.results,
                writer=run.model,
            ),
            block,
            use,
        )
        saved.add_done_callback(lambda _: self.discard(run))
        return saved

    def flush_later(self, run: Run) -> None:
        """Flush the events of a run after at most `FLUSH_SECONDS`, together with those of all others."""
        if not self._due:
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)
        self._due.append(run)

    def _flush(self) -> None:
        try:
            for _ in range(min(len(self._due), FLUSHED_AT_ONCE)):
                self._due.popleft().flush()
        finally:  # a run whose events cannot be stored shall not keep those of the others
            if self._due:
                asyncio.get_running_loop().call_soon(self._flush)

    def discard(self, run: Run) -> None:
        """Forget a run.  Its current readers can still read it to the end."""
        self._runs.pop(run.response.id, None)

    def _add(self, stored: StoredResponse, log: EventLog, commit: asyncio.Future[None] | None = None) -> Run:
        run = self._runs[stored.response.id] = Run(stored, self, log, commit)
        return run


async def read_stored_log(
    response: Response, blocks: Iterable[Block], after: int = -1
) -> AsyncGenerator[ResponseEvent, None]:
    """Yield the events of a stored log after sequence number ``after``, as `Run.follow` does."""
    number = -1
    for count, event in enumerate(read_blocks(response, blocks)):
        if count % EVENTS_AT_ONCE == 0:
            await asyncio.sleep(0)
        number = event.sequence_number
        if number > after:
            yield event
    for event in _end_for(after, number, response):
        yield event


def _end_for(after: int, last: int, response: Response) -> Iterator[TerminalEvent]:
    """Yield the terminal event for a reader who is past the ``last`` event, which is the terminal one.

    If the server was killed, the reader may have seen events that were not stored.  Their sequence numbers then belong
    to other events in the log: so even a reader at ``last`` may have seen another event under that number, and gets the
    terminal event under the next one.
    """
    if after >= last and response.error is not None and response.error.message == RunInterrupted().message:
        yield last_event(after + 1, response)
    elif after > last:
        yield last_event(last, response)
