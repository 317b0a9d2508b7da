"""Live responses: the runs of this process, each with its log, which is written once and followed by any number.

The writer never waits: it appends, and about every quarter of a second what is new goes to the store as one block.
Only the end waits for its commit, and not for long.  However a run is left, it ends in good order by its own log.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterable, Iterator

from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.errors import RunInterrupted, ServerStopping
from penstock.pipeline.frames import ItemResult, ItemTokens, ResponseStarted, TokenIds
from penstock.pipeline.lifecycle.outcome import last_event
from penstock.pipeline.lifecycle.rules import rule
from penstock.pipeline.protocol.events import ResponseEvent, TerminalEvent
from penstock.pipeline.protocol.response import Response
from penstock.stages.services.runs.event_log import Block, EventLog, LogReader, read_blocks
from penstock.stages.services.store.store import Store, StoredResponse

FLUSH_SECONDS = 0.25
"""How long an event may be in memory alone."""

FLUSH_EVENTS = 1024
"""How many events may be in memory alone; of a token each, they are some 4 KB of text."""

EVENTS_AT_ONCE = 256
"""How many events of a stored log are read before the loop may turn to others."""

PATIENCE = 1.0
"""Seconds that the end of a run waits for its commit."""


class RunMoved(ServerStopping):
    """The response waited here for its turn, and is now for another server to make."""


class LiveResponse:
    """One run.

    ``response`` is how it began, then how it ended; ``tokens`` and ``results`` are those of its output items so far.
    Once it has ``ended`` it takes nothing more.
    """

    def __init__(self, stored: StoredResponse, live: LiveResponses, log: EventLog) -> None:
        self.response = stored.response
        self.input = stored.input
        self.origin = stored.origin
        self.tokens: dict[str, TokenIds] = {}
        self.results: dict[str, str] = {}
        self.ended = False
        self._live = live
        self._log = log
        self._next = log.next_number
        self._moved = False
        self._news: asyncio.Event | None = None  # of those who wait for what comes next: few runs have any
        self._closed = False  # it has ended, and there was time to save that
        self._timer: asyncio.TimerHandle | None = None
        self._saved: asyncio.Future[None] | None = None

    # Writing

    def append(self, event: ResponseEvent) -> bool:
        """Take the next event; False of one that the log has, or that comes behind the end: it is ignored."""
        number = event.sequence_number
        if number != self._next:
            return self._skip(event)
        self._next = number + 1
        fresh = self._log.fresh
        fresh.append(event)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)
        elif len(fresh) == FLUSH_EVENTS:
            self._flush()
        if self._news is not None:
            self._tell()
        return True

    def _skip(self, event: ResponseEvent) -> bool:
        """Ignore an event that the log has, or that comes behind the end; raise where one between is missing."""
        rule(
            event.sequence_number < self._next, "sequence numbers count from 0 without gaps: a stage has lost an event"
        )
        return False

    def keep(self, frame: ItemTokens | ItemResult) -> None:
        """Take what nobody is told of an item."""
        if isinstance(frame, ItemTokens):
            self.tokens[frame.item_id] = frame.token_ids
        else:
            self.results[frame.item_id] = frame.result

    async def end(self, event: TerminalEvent) -> None:
        """Take the last event, and give its commit a moment: whoever sees the end may ask for the response at once."""
        if event.sequence_number != self._next:
            self._skip(event)
            return
        self._log.append(event)
        try:
            self._end(self._log.seal())
            await self.saved()
        finally:
            self._close()

    def break_off(self, error: Exception | None) -> None:
        """End the run here, unless it has ended: it fails because of ``error``; where there is none, it is cancelled.

        Whatever its pipeline still says is ignored.  The end is stored, but nobody waits for that.
        """
        if self.ended:
            return
        try:
            self._end(self._log.break_off(error))
        finally:
            self._close()

    async def saved(self) -> None:
        """Give the commit of its end a moment."""
        if self._saved is not None:
            await asyncio.wait([self._saved], timeout=PATIENCE)

    def start(self) -> None:
        """Go on from the queue, unless it has ended there."""
        if self.ended:
            return
        self.response = replace(self.response, status="in_progress")
        self._live.store.start(self.response)

    def hand_over(self) -> None:
        """Leave the response to another server, unless it has ended: nothing more is heard of it here."""
        if self.ended:
            return
        self._moved = True
        self._stop()
        self._close()
        self._live.discard(self)

    # Reading

    async def follow(self, after: int = -1) -> AsyncGenerator[ResponseEvent, None]:
        """The events behind the one of number ``after``, those to come included; raises `RunMoved`.

        A reader who was further than the run ever came, because a server died in between, gets the last event, under
        the number that is next for that reader.
        """
        reader = LogReader(self._log, after)
        while True:
            for event in reader.read():
                if self.ended and isinstance(event, TerminalEvent):
                    await self.wait()
                yield event
            if reader.is_behind:
                await asyncio.sleep(0)
            elif self._moved:
                raise RunMoved
            elif self.ended:
                break
            else:
                await self._anything_new()
        if _is_ahead(after, self._log.last_number, self.response):
            yield last_event(after + 1, self.response)

    async def wait(self) -> None:
        """Return once the run has ended, and there was time to save that."""
        while not self._closed:
            await self._anything_new()

    async def _anything_new(self) -> None:
        self._news = self._news or asyncio.Event()
        await self._news.wait()

    # Storing

    def _flush(self) -> None:
        """Hand what is new to the store, without waiting."""
        self._stop_timer()
        block = self._log.seal()
        if block is not None and self.response.store:
            self._live.store.append(self.response.id, block)

    def _end(self, block: Block | None) -> None:
        """Store the end, which the log has."""
        self.response = self._log.response
        self._stop()
        self._saved = self._live.end(self, block)

    def _stop(self) -> None:
        """Take no more events, and tell those who wait for any."""
        self.ended, self._next = True, sys.maxsize
        self._stop_timer()
        self._tell()

    def _close(self) -> None:
        self._closed = True
        self._tell()

    def _tell(self) -> None:
        """Wake those who wait for what comes next."""
        news, self._news = self._news, None
        if news is not None:
            news.set()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class LiveResponses:
    """The runs of this process, by the response's id, until they have ended and that is saved in ``store``."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._runs: dict[str, LiveResponse] = {}

    def __iter__(self) -> Iterator[LiveResponse]:
        return iter(tuple(self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def queued(self) -> tuple[LiveResponse, ...]:
        """Those that wait for their turn."""
        return tuple(run for run in self if run.response.status == "queued")

    @property
    def running(self) -> tuple[LiveResponse, ...]:
        """Those that are being made."""
        return tuple(run for run in self if run.response.status == "in_progress")

    def get(self, response_id: str, owner: str) -> LiveResponse | None:
        """The run of that response, if it is here and of that owner."""
        run = self._runs.get(response_id)
        return run if run is not None and run.origin.owner == owner else None

    def queue(self, stored: StoredResponse) -> LiveResponse:
        """Take a response that is in the store's queue: the first events of its log say that it waits.

        As there may be many, its input is left to the store until it begins.
        """
        log = EventLog(stored.response)
        log.begin()
        return self._add(replace(stored, input=()), log)

    def begin(self, started: ResponseStarted) -> LiveResponse:
        """The run of a response that begins, which may have waited here; the store learns of it without a wait."""
        run = self._runs.get(started.response.id)
        if run is not None:
            run.input = started.input
            run.start()
            return run
        stored = StoredResponse(started.response, started.input, started.origin)
        if stored.response.store:
            self.store.begin(stored)
        return self._add(stored, EventLog(stored.response))

    def adopt(self, stored: StoredResponse, blocks: Iterable[Block]) -> LiveResponse:
        """Take what a dead server left of a run, to be ended here."""
        return self._add(stored, EventLog(stored.response, blocks))

    def end(self, run: LiveResponse, block: Block | None) -> asyncio.Future[None] | None:
        """Store how a run ended; it stays here until that is saved."""
        response = run.response
        if not response.store and response.conversation is UNSET:
            self.discard(run)
            return None
        saved = self.store.end(StoredResponse(response, run.input, run.origin, run.tokens, run.results), block)
        saved.add_done_callback(lambda _: self.discard(run))
        return saved

    def discard(self, run: LiveResponse) -> None:
        """Forget a run; those who follow it keep it until they are through."""
        self._runs.pop(run.response.id, None)

    def _add(self, stored: StoredResponse, log: EventLog) -> LiveResponse:
        run = self._runs[stored.response.id] = LiveResponse(stored, self, log)
        return run


async def replayed(response: Response, blocks: Iterable[Block], after: int = -1) -> AsyncGenerator[ResponseEvent, None]:
    """The events of a stored log behind the one of number ``after``, as `LiveResponse.follow` gives them."""
    number = -1
    for count, event in enumerate(read_blocks(response, blocks)):
        if count % EVENTS_AT_ONCE == 0:
            await asyncio.sleep(0)
        number = event.sequence_number
        if number > after:
            yield event
    if _is_ahead(after, number, response):
        yield last_event(after + 1, response)


def _is_ahead(after: int, last: int, response: Response) -> bool:
    """Whether a reader may have seen what nobody can tell any more: the last words of a server that was killed.

    Its numbers then stand for other events, that of the last one included.
    """
    killed = response.error is not None and response.error.message == RunInterrupted().message
    return after > last or (killed and after == last)
