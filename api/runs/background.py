"""Background responses: a limited number run at once, and the others wait.

The API keys take turns, and the responses of one key run in order.  Each runs in a task of its own, which pulls it
through the pipeline and needs no client.  A waiting response is hardly more than an id here: its request is in the
store, so that the next server finds it too.  Only the secrets of its MCP servers are not stored.  They are kept in this
process until the response has ended or moved to another server.  Another server, or this one after a restart, runs the
response without them, and an MCP server that requires them fails as an item.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from msgspec.structs import replace

from penstock.api.http.access_log import fields_of, outcome_of
from penstock.pipeline.errors import EngineOverloaded, ServerStopping, StageError, StoreFailed
from penstock.pipeline.frames import ResolvedRequest, with_facts
from penstock.pipeline.logs import current_response
from penstock.pipeline.protocol.tools import McpServer
from penstock.stages.services.runs.run import Run, RunRegistry
from penstock.stages.services.store.store import Store

logger = logging.getLogger(__name__)

RETRY_PAUSE = 1.0
"""Seconds before a response that could not begin is tried again."""

RunResponse: TypeAlias = Callable[[ResolvedRequest], Awaitable[None]]
"""A function that runs a response to its end, and raises only errors that keep it from beginning."""


@dataclass
class InFlight:
    """The requests and background runs in flight; each enters this context manager while it lasts.

    A stopping server refuses new ones, and waits for these.
    """

    stopping: bool = False
    """True if new requests are refused."""
    leaving: bool = False
    """True if new requests are answered, but clients have to open new connections for the next."""
    _tasks: set[asyncio.Task[Any] | None] = field(default_factory=set)
    _refused: set[asyncio.Task[Any] | None] = field(default_factory=set)

    @property
    def count(self) -> int:
        """The number of requests in flight."""
        return len(self._tasks)

    def __enter__(self) -> None:
        """Take a request in; raise `ServerStopping` if the server is stopping."""
        if self.stopping:
            raise ServerStopping
        self._tasks.add(asyncio.current_task())

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Let a request go; raise `ServerStopping` if it was refused."""
        task = asyncio.current_task()
        self._tasks.discard(task)
        if task and task in self._refused and isinstance(error, asyncio.CancelledError):
            self._refused.discard(task)
            task.uncancel()
            raise ServerStopping from None

    def refuse(self) -> None:
        """End the requests that are still in flight: their clients get `ServerStopping`, if they have no answer yet."""
        self._refused.update(self._tasks)
        for task in filter(None, tuple(self._tasks)):
            task.cancel()

    async def drain(self, seconds: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Refuse new requests, and wait up to ``seconds``, or until ``is_hurried``, for those in flight to end."""
        self.stopping = True
        deadline = time.monotonic() + seconds
        while self.count and time.monotonic() < deadline and not is_hurried():
            await asyncio.sleep(0.02)


@dataclass(frozen=True)
class _Waiting:
    """A queued run, with the MCP servers and the context of its request."""

    run: Run
    servers: tuple[McpServer, ...]
    context: Context = field(default_factory=copy_context)


class _WaitingRuns:
    """The queued runs by owner; the owners take turns."""

    def __init__(self) -> None:
        self._by_owner: dict[str, dict[str, _Waiting]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    def count(self, owner: str) -> int:
        return len(self._by_owner.get(owner, ()))

    def add(self, waiting: _Waiting) -> None:
        run = waiting.run
        self._by_owner.setdefault(run.origin.owner, {})[run.response.id] = waiting

    def discard(self, run: Run) -> None:
        own = self._by_owner.get(run.origin.owner, {})
        own.pop(run.response.id, None)
        if not own:
            self._by_owner.pop(run.origin.owner, None)

    def take(self) -> _Waiting:
        """Remove and return the first run of the owner whose turn it is."""
        owner = next(iter(self._by_owner))
        own = self._by_owner.pop(owner)
        first = own.pop(next(iter(own)))
        if own:
            self._by_owner[owner] = own  # at the end: the other owners come first
        return first


@dataclass
class BackgroundQueue:
    """The background responses of this server: at most ``limit`` run at once, and fewer than ``longest`` wait."""

    run: RunResponse
    runs: RunRegistry
    store: Store
    in_flight: InFlight
    limit: int
    longest: int = 20_000
    _waiting: _WaitingRuns = field(default_factory=_WaitingRuns)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def check(self, owner: str) -> None:
        """Raise `EngineOverloaded` if the owner has as many places in the queue as are free.

        So one owner can take half of the queue, a second one a quarter, and none can lock the others out.
        """
        if self._waiting.count(owner) >= self.longest - len(self._waiting):
            raise EngineOverloaded("Too many background responses are waiting. Try again later.")

    def add(self, run: Run, servers: tuple[McpServer, ...] = ()) -> None:
        """Queue a response, which is already queued in the store, to run when its turn comes.

        ``servers`` are the MCP servers of its request, if this process knows their secrets.
        """
        self._waiting.add(_Waiting(run, servers))
        if self.in_flight.stopping:
            self.release_queued()
        else:
            self._begin_next()

    def interrupt(self, run: Run) -> None:
        """Take a response out of the queue, or cancel its task."""
        self._waiting.discard(run)
        if task := self._tasks.get(run.response.id):
            task.cancel()

    def release_queued(self) -> None:
        """Leave the queued responses to the next server."""
        for run in self.runs.queued:
            self.store.release(run.response.id)
            run.release()
            self.interrupt(run)

    def release_running(self) -> None:
        """Leave the running responses to the next server as well, which starts them over."""
        for run in self.runs.running:
            if run.response.id in self._tasks:
                run.release()
                self.interrupt(run)

    def _begin_next(self) -> None:
        while self._waiting and len(self._tasks) < self.limit:
            next_one = self._waiting.take()
            response_id = next_one.run.response.id
            running = self._run(next_one.run, next_one.servers)
            task = self._tasks[response_id] = asyncio.create_task(running, context=next_one.context)
            task.add_done_callback(partial(self._end, response_id))

    def _end(self, response_id: str, task: asyncio.Task[None]) -> None:
        del self._tasks[response_id]
        self._begin_next()

    async def _run(self, run: Run, servers: tuple[McpServer, ...]) -> None:
        current_response.set(run.response.id)
        with self.in_flight:
            while not await self._has_run(run, servers):
                await asyncio.sleep(RETRY_PAUSE)
        logger.info("In the background: %s", outcome_of(run.response), extra=fields_of(run.response))

    async def _has_run(self, run: Run, servers: tuple[McpServer, ...]) -> bool:
        """Run a response; return False if it has to wait longer, because the engine or the store cannot take it now."""
        try:
            request = await self.store.queued(run.response.id)
            if request is None:
                run.release()  # it was deleted, or taken over by a server that considered this one dead
            else:
                await self.run(_with_secrets(request, servers))
        except (EngineOverloaded, StoreFailed) as error:
            logger.info("Response %s has to wait: %s", run.response.id, error)
            return False
        except Exception as error:
            cause = error.__cause__ if isinstance(error, StageError) else error
            logger.warning("Response %s could not begin: %s", run.response.id, error, exc_info=cause)
            run.fail(error)
        return True


def _with_secrets(request: ResolvedRequest, servers: tuple[McpServer, ...]) -> ResolvedRequest:
    """Put the MCP servers of the request, secrets included, into its stored one, if they are known."""
    return with_facts(request, tools=replace(request.facts.tools, servers=servers)) if servers else request
