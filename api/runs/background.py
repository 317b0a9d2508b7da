"""Background responses: a limited number run at once, the others wait in order.

Each runs in a task of its own, which pulls it through the pipeline and needs no client.  A waiting response is hardly
more than an id here: its conversation is in the store, so that the next server finds it too.  Only the secrets of its
MCP servers are not stored.  They are kept in this process until the response has ended or moved to another server.
Another server, or this one after a restart, runs the response without them, and an MCP server that requires them fails
as an item.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from msgspec.structs import replace

from penstock.api.http.access_log import outcome_of
from penstock.api.runs.admission import Admission
from penstock.pipeline.errors import EngineOverloaded, StageError, StoreFailed
from penstock.pipeline.frames import Conversation
from penstock.pipeline.logs import current_response
from penstock.pipeline.protocol.tools import McpServer
from penstock.stages.services.runs.live import LiveResponse, LiveResponses
from penstock.stages.services.store.store import Store

logger = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds before a response that could not begin is tried again."""

Make: TypeAlias = Callable[[Conversation], Awaitable[None]]
"""A function that runs a response to its end, and raises only errors that keep it from beginning."""


@dataclass(frozen=True)
class _Waiting:
    """A response in the queue, and the MCP servers of its request with their secrets."""

    run: LiveResponse
    servers: tuple[McpServer, ...]


@dataclass
class Background:
    """The background responses of this server: at most ``limit`` run at once, and at most ``longest`` wait."""

    make: Make
    live: LiveResponses
    store: Store
    admission: Admission
    limit: int
    longest: int = 10_000
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def check(self) -> None:
        """Raise `EngineOverloaded` if the queue is full."""
        if len(self._waiting) >= self.longest:
            raise EngineOverloaded("Too many background responses are waiting. Try again later.")

    def add(self, run: LiveResponse, servers: tuple[McpServer, ...] = ()) -> None:
        """Queue a response, which is already queued in the store, to run when its turn comes.

        ``servers`` are the MCP servers of its request, if this process knows their secrets.
        """
        self._waiting[run.response.id] = _Waiting(run, servers)
        if self.admission.stopping:
            self.release()
        else:
            self._begin_next()

    def interrupt(self, response_id: str) -> None:
        """Take a response out of the queue, or cancel its task."""
        self._waiting.pop(response_id, None)
        if task := self._tasks.get(response_id):
            task.cancel()

    def release(self) -> None:
        """Leave the responses that have not begun to the next server."""
        for run in self.live.queued:
            self.store.release(run.response.id)
            run.hand_over()
            self.interrupt(run.response.id)

    def put_back(self) -> None:
        """Leave the responses that have begun to the next server as well, which starts them over."""
        for run in self.live.running:
            if run.response.id in self._tasks:
                run.hand_over()
                self.interrupt(run.response.id)

    def _begin_next(self) -> None:
        while self._waiting and len(self._tasks) < self.limit:
            response_id = next(iter(self._waiting))
            task = asyncio.create_task(self._run(self._waiting.pop(response_id)))
            self._tasks[response_id] = task
            task.add_done_callback(partial(self._end, response_id))

    def _end(self, response_id: str, task: asyncio.Task[None]) -> None:
        del self._tasks[response_id]
        self._begin_next()

    async def _run(self, waiting: _Waiting) -> None:
        run = waiting.run
        current_response.set(run.response.id)
        with self.admission:
            while not await self._made(waiting):
                await asyncio.sleep(PATIENCE)
        logger.info("In the background: %s", outcome_of(run.response))

    async def _made(self, waiting: _Waiting) -> bool:
        """Run a response; return False if it has to wait longer, because the engine or the store cannot take it now."""
        run = waiting.run
        try:
            conversation = await self.store.queued(run.response.id)
            if conversation is None:
                run.hand_over()  # it was deleted, or taken over by a server that considered this one dead
            else:
                await self.make(_told_secrets(conversation, waiting.servers))
        except (EngineOverloaded, StoreFailed) as error:
            logger.info("Response %s has to wait: %s", run.response.id, error)
            return False
        except Exception as error:
            cause = error.__cause__ if isinstance(error, StageError) else error
            logger.warning("Response %s could not begin: %s", run.response.id, error, exc_info=cause)
            run.break_off(error)
        return True


def _told_secrets(conversation: Conversation, servers: tuple[McpServer, ...]) -> Conversation:
    """Put the MCP servers of the request, secrets included, into its stored conversation, if they are known."""
    return replace(conversation, tools=replace(conversation.tools, servers=servers)) if servers else conversation
