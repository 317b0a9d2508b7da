"""Background responses: a limited number run at once, and the others wait.

A free slot goes to the API key with the fewest, and the responses of one key run in order.  Each runs in a task of its
own, which pulls it through the pipeline and needs no client.  Its pipeline is opened at once, and waits for the slot in
front of the engine, so that the errors of its prompt are those of the request.  If `most_open` wait already, it is
hardly more than an id here: its request is in the store, from which it begins after `normalize` when its turn comes.

The store has the request of each, so that the next server finds it too.  Only the secrets of its MCP servers are not
stored.  They are kept in this process until the response has ended or moved to another server.  Another server, or this
one after a restart, runs the response without them, and an MCP server that requires them fails as an item.
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
from penstock.api.runs.opened import Opened
from penstock.pipeline.errors import EngineOverloaded, ModelAway, ServerStopping, StageError, StoreFailed
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.frames import ResolvedRequest, with_facts
from penstock.pipeline.logs import current_response
from penstock.pipeline.protocol.tools import McpServer
from penstock.services.runs.run import Run, RunRegistry
from penstock.services.runs.turns import Turn, own
from penstock.services.slots import Slots
from penstock.services.store.store import Store

logger = logging.getLogger(__name__)

CLOSE_WAIT = 5.0
"""Seconds for the stages of waiting responses to end when the server stops."""

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


RunOpened: TypeAlias = Callable[[Opened], Awaitable[None]]
"""Runs a response whose pipeline is open, once its `Turn` has come."""


@dataclass(eq=False)
class Waiting:
    """A response whose pipeline is open, and waits for its ``turn`` in a ``task`` of its own."""

    turn: Turn
    task: asyncio.Task[None]

    async def run(self) -> None:
        """Run the response to its end; raise the errors that keep it from beginning."""
        self.turn.come()
        await self.task

    async def close(self) -> None:
        """Close the pipeline."""
        self.task.cancel()
        await asyncio.wait([self.task])


@dataclass
class BackgroundQueue:
    """The background responses of this server: each runs in one of its ``slots``, and fewer than ``longest`` wait.

    The pipelines of ``most_open`` wait open.
    """

    run: RunResponse
    run_opened: RunOpened
    runs: RunRegistry
    store: Store
    in_flight: InFlight
    slots: Slots
    longest: int = 20_000
    most_open: int = 256
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    waiting: dict[str, Waiting] = field(default_factory=dict)
    """The open pipelines of responses whose turn has not come, by response id."""
    opening: set[asyncio.Task[None]] = field(default_factory=set)
    """The tasks of open pipelines that wait, or come to it."""

    def check(self, owner: str) -> None:
        """Raise `EngineOverloaded` if the owner has as many places in the queue as are free.

        So one owner can take half of the queue, a second one a quarter, and none can lock the others out.
        """
        if self.slots.waiting_of(owner) >= self.longest - self.slots.waiting:
            raise EngineOverloaded("Too many background responses are waiting. Try again later.")

    async def open(self, opened: Opened) -> Waiting | None:
        """Run a response to where it waits for its turn, and return it; raise the errors that keep it from that.

        Returns None if too many wait already: the stages before `normalize` have then ended.
        """
        if len(self.opening) >= self.most_open:
            await opened.half.finish()
            return None
        turn = Turn()
        task = asyncio.create_task(self._run_opened(opened.taken(), turn))
        self.opening.add(task)
        task.add_done_callback(self._closed)
        waiting = Waiting(turn, task)
        try:
            await turn.awaited
        except asyncio.CancelledError:  # the client has left
            await waiting.close()
            raise
        return waiting

    async def _run_opened(self, opened: Opened, turn: Turn) -> None:
        own.set(turn)
        try:
            async with opened:
                await self.run_opened(opened)
        except Exception as error:
            if turn.awaited.done():
                raise
            turn.awaited.set_exception(error)
        finally:
            turn.awaited.cancel()  # a stage may cancel itself

    def _closed(self, task: asyncio.Task[None]) -> None:
        self.opening.discard(task)
        if not task.cancelled():
            task.exception()  # it may have failed while it waited, and been cancelled by its client before its turn

    def add(self, run: Run, servers: tuple[McpServer, ...] = (), waiting: Waiting | None = None) -> None:
        """Queue a response, which is already queued in the store, to run when its turn comes.

        ``servers`` are the MCP servers of its request, if this process knows their secrets.
        """
        if waiting is not None:
            self.waiting[run.response.id] = waiting
        if self.in_flight.stopping:
            self._release(run)
        else:
            begin = partial(self._begin, run, servers, copy_context())
            self.slots.request(run.origin.owner, run.response.id, begin)

    def interrupt(self, run: Run) -> None:
        """Take a response out of the queue, or cancel its task."""
        self.slots.withdraw(run.origin.owner, run.response.id)
        if waiting := self.waiting.pop(run.response.id, None):
            waiting.task.cancel()
        if task := self._tasks.get(run.response.id):
            task.cancel()

    async def release_queued(self) -> None:
        """Leave the queued responses to the next server, and wait for the end of their stages here."""
        waiting = [each.task for each in self.waiting.values()]
        for run in self.runs.queued:
            self._release(run)
        if waiting:
            await asyncio.wait(waiting, timeout=CLOSE_WAIT)

    def _release(self, run: Run) -> None:
        self.store.release(run.response.id)
        run.release()
        self.interrupt(run)

    def release_running(self) -> None:
        """Leave the running responses to the next server as well, which starts them over."""
        for run in self.runs.running:
            if run.response.id in self._tasks:
                run.release()
                self.interrupt(run)

    def _begin(self, run: Run, servers: tuple[McpServer, ...], context: Context) -> None:
        task = asyncio.create_task(self._run(run, servers), context=context)
        self._tasks[run.response.id] = task
        task.add_done_callback(partial(self._end, run))

    def _end(self, run: Run, _: asyncio.Task[None]) -> None:
        del self._tasks[run.response.id]
        self.slots.release(run.origin.owner)

    async def _run(self, run: Run, servers: tuple[McpServer, ...]) -> None:
        current_response.set(run.response.id)
        with self.in_flight:
            while not await self._has_run(run, servers):
                await asyncio.sleep(RETRY_PAUSE)
        logger.info("In the background: %s", outcome_of(run.response), extra=fields_of(run.response))

    async def _has_run(self, run: Run, servers: tuple[McpServer, ...]) -> bool:
        """Run a response; return False if it has to wait longer, because the engine or the store cannot take it now."""
        try:
            if run.response.id in self.waiting:
                await self._run_waiting(run)
            elif (request := await self.store.queued(run.response.id)) is None:
                run.release()  # it was deleted, or taken over by a server that considered this one dead
            else:
                await self.run(_with_secrets(request, servers))
        except (EngineOverloaded, StoreFailed) as error:
            logger.info("Response %s has to wait: %s", run.response.id, error)
            return False
        except ModelAway as error:  # the models have changed since it was accepted
            logger.warning("Response %s is left to another server: %s", run.response.id, error)
            self.store.release(run.response.id)
            run.release()
        except Exception as error:
            cause = error.__cause__ if isinstance(error, StageError) else error
            logger.warning("Response %s could not begin: %s", run.response.id, named_error(error), exc_info=cause)
            run.fail(error)
        return True

    async def _run_waiting(self, run: Run) -> None:
        """Run a response whose pipeline waits for its turn, which has come."""
        server = await self.store.runner(run.response.id)
        waiting = self.waiting.pop(run.response.id)
        self.opening.discard(waiting.task)
        if server is not None and server.id == self.store.server_id:
            await waiting.run()
        else:  # as in `_has_run`
            run.release()
            await waiting.close()


def _with_secrets(request: ResolvedRequest, servers: tuple[McpServer, ...]) -> ResolvedRequest:
    """Put the MCP servers of the request, secrets included, into its stored one, if they are known."""
    return with_facts(request, tools=replace(request.facts.tools, servers=servers)) if servers else request
