"""The responses that are being made by this server: begun, followed, cancelled, and brought to an end when it stops.

There are three ways to make one.  In front of its client, in the task of the request itself, so that no token changes
tasks.  In the background, queued and limited.  And detached: in a task of its own, at once, so that it survives its
client.  However it is made, `Persist` keeps the log of it, and any other reader follows that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from penstock.api.runs.admission import Admission
from penstock.api.runs.background import Background
from penstock.api.runs.recovery import Settling
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import (
    ContextTooLong,
    EngineDead,
    ResponseNotFound,
    RunInterrupted,
    ServerUnreachable,
    StageError,
)
from penstock.pipeline.faults import first, name_stage
from penstock.pipeline.frames import Conversation, Prompt
from penstock.pipeline.lifecycle.rules import rule
from penstock.pipeline.protocol.events import ResponseEvent, TerminalEvent
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.format import replay
from penstock.stages.services.engines.engine import Engine
from penstock.stages.services.runs.live import LiveResponse, LiveResponses, RunMoved
from penstock.stages.services.store.store import Server, Store, StoredResponse

logger = logging.getLogger(__name__)

UNENDED = frozenset({"queued", "in_progress"})
"""The statuses of a response that is not over."""

CANCEL_WAIT = 1.0
"""Seconds in which a response that is cancelled may end by itself."""

LOOKS, LOOK_AGAIN = 40, 0.25
"""How often, and after how many seconds, it is looked for a response between two servers."""

STOP_WAIT = 0.5
"""Seconds in which what the engine is told to stop ends by itself; what runs a tool hears nothing of that."""

LAST_WORDS = 5.0
"""Seconds in which responses that were stopped send and store their end."""


@dataclass(slots=True)
class _Reader:
    """A request that makes its response itself: its task, and the last stage that it pulls."""

    task: asyncio.Task[Any] | None
    events: Any
    is_interrupted: bool = False

    def interrupt(self) -> None:
        """Call it back from the stage that it waits for; from its client it comes back by itself."""
        if self.task and self.events.ag_running:
            self.is_interrupted = True
            self.task.cancel()

    def has_been_interrupted(self) -> bool:
        """Whether a `CancelledError` was only that."""
        return self.task is not None and self.is_interrupted and not self.task.uncancel()


@dataclass
class Runs:
    """The runs of one pipeline.

    ``limit`` is how many may run in the background at once.  With ``detaches`` stored responses survive their clients,
    and with ``restarts`` those of the background are made again when a server ended in the middle of them.
    """

    pipeline: Pipeline[CreateResponse, ResponseEvent]
    engine: Engine
    live: LiveResponses
    store: Store
    limit: int = 64
    detaches: bool = False
    restarts: bool = False
    admission: Admission = field(default_factory=Admission)

    def __post_init__(self) -> None:
        self._reading: Pipeline[CreateResponse, Conversation] = self.pipeline.upto("normalize")
        self._making: Pipeline[Conversation, ResponseEvent] = self.pipeline.behind("normalize")
        self._rendering: Pipeline[Conversation, Prompt] = self._making.upto("render")
        self._interrupts: dict[str, Callable[[], Any]] = {}
        """What calls off the making of a response outside of the background, by its id."""
        self.background = Background(self._make, self.live, self.store, self.admission, self.limit)
        self.settling = Settling(self.store, self.live, self.background, self.restarts)

    # Beginning

    async def prepare(self, request: CreateResponse) -> Conversation:
        """What a request is about; raises whatever is wrong with it.

        If it belongs to a conversation, that is locked from here on.
        """
        if request.store is not False:
            self.store.check()
        async with self._reading.open(replay([request])) as conversations:
            conversation = await first(conversations)
        response, origin = conversation.response, conversation.origin
        if response.conversation is not UNSET:
            with self._unlocking(response):  # a client that leaves meanwhile leaves no lock
                await self.store.conversations.lock(
                    response.conversation.id, origin.owner, response.id, origin.position
                )
        return conversation

    def events(self, conversation: Conversation) -> AsyncGenerator[ResponseEvent, None]:
        """Make a response, and tell its events; whatever is raised ahead of the first one keeps it from beginning."""
        response = conversation.response
        if response.background:
            return self._in_background(conversation)
        if self.detaches and response.store:
            return self._detached(conversation)
        return self._in_front(conversation)

    async def queue(self, conversation: Conversation) -> LiveResponse:
        """Take a response on for the background; it is stored before this returns.

        Raises what is wrong with its prompt, `EngineDead`, `EngineOverloaded` and `StoreFailed`.
        """
        queued = replace(conversation.response, status="queued")
        with self._unlocking(queued):
            self._check_engine()
            self.background.check()
            await self._check_prompt(conversation)
        stored = StoredResponse(queued, conversation.input, conversation.origin)
        return await asyncio.shield(self._accept(stored, conversation))  # a client that leaves leaves no half of it

    async def _accept(self, stored: StoredResponse, conversation: Conversation) -> LiveResponse:
        with self._unlocking(stored.response):
            await self.store.accept(stored, conversation)
        run = self.live.queue(stored)
        self.background.add(run, conversation.tools.servers)
        return run

    def _check_engine(self) -> None:
        """Take nothing on that would wait only to fail."""
        if not self.engine.is_alive:
            raise EngineDead("The engine has died.")

    async def _check_prompt(self, conversation: Conversation) -> None:
        """Render once, to refuse at once what could never begin."""
        async with self._rendering.open(replay([conversation])) as prompts:
            length = len((await first(prompts)).token_ids)
        if length >= self.engine.context_length:
            raise ContextTooLong(length, self.engine.context_length)

    @contextmanager
    def _unlocking(self, response: Response) -> Iterator[None]:
        """Let go of the conversation of a response that cannot begin."""
        try:
            yield
        except BaseException:
            if response.conversation is not UNSET:
                self.store.conversations.unlock(response.conversation.id, response.id)
            raise

    # Making

    async def _in_front(self, conversation: Conversation) -> AsyncGenerator[ResponseEvent, None]:
        """Make a response in the task that reads its events; its stream ends in good order whatever a stage does."""
        response_id = conversation.response.id
        async with self._making.open(replay([conversation])) as events:
            with self._unlocking(conversation.response):
                event = await first(events)
            run, reader = self._run_of(conversation), _Reader(asyncio.current_task(), events)
            self._interrupts[response_id] = reader.interrupt
            try:
                yield event
                async for event in events:
                    yield event
                _check_ended(run)
            except asyncio.CancelledError:
                if not reader.has_been_interrupted():
                    raise
            except Exception as error:  # noqa: BLE001 - it is logged, and told in the stream
                _fail(run, error)
            finally:
                del self._interrupts[response_id]
        if not isinstance(event, TerminalEvent):
            async with aclosing(run.follow(event.sequence_number)) as rest:
                async for event in rest:
                    yield event

    async def _in_background(self, conversation: Conversation) -> AsyncGenerator[ResponseEvent, None]:
        run = await self.queue(conversation)
        async with aclosing(run.follow()) as events:
            async for event in events:
                yield event

    async def _detached(self, conversation: Conversation) -> AsyncGenerator[ResponseEvent, None]:
        """Make a response in a task of its own; its reader follows it, and may leave."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._make_detached(conversation, begun))
        self._interrupts[conversation.response.id] = task.cancel
        task.add_done_callback(lambda _: self._interrupts.pop(conversation.response.id))
        await asyncio.shield(begun)
        async with aclosing(self._run_of(conversation).follow()) as events:
            async for event in events:
                yield event

    async def _make_detached(self, conversation: Conversation, begun: asyncio.Future[None]) -> None:
        try:
            with self._unlocking(conversation.response), self.admission:
                await self._make(conversation, partial(begun.set_result, None))
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            begun.set_exception(error)

    async def _make(self, conversation: Conversation, begun: Callable[[], None] = lambda: None) -> None:
        """Make a response that its readers follow; raises only what keeps it from beginning."""
        async with self._making.open(replay([conversation])) as events:
            try:
                await first(events)
            except Exception as error:
                run = self.live.get(conversation.response.id, conversation.origin.owner)
                if run and run.response.status == "in_progress":
                    _fail(run, error)
                raise
            begun()
            run = self._run_of(conversation)
            try:
                async for _ in events:
                    pass
                _check_ended(run)
            except Exception as error:  # noqa: BLE001 - it is logged, and told in the stream
                _fail(run, error)

    def _run_of(self, conversation: Conversation) -> LiveResponse:
        run = self.live.get(conversation.response.id, conversation.origin.owner)
        if run is None:
            raise RuntimeError("a response that has begun is among the live ones")
        return run

    # Finding and ending

    async def find(self, response_id: str, owner: str) -> LiveResponse | StoredResponse | Server:
        """Who can tell of a response: the run itself, the store once it is over, or the server that is at it.

        What a dead server left is waited for until somebody has settled it.  Raises `ResponseNotFound`, and
        `ServerUnreachable` where that takes too long.
        """
        for _ in range(LOOKS):
            if run := self.live.get(response_id, owner):
                return run
            stored = await self.store.get(response_id, owner)
            if stored is None:
                raise ResponseNotFound(shortened(response_id))
            if stored.response.status not in UNENDED:
                return stored
            server = await self.store.runner(response_id)
            if server and server.is_alive and server.id != self.store.server_id:
                return server
            await asyncio.sleep(LOOK_AGAIN)
        raise ServerUnreachable

    async def cancel(self, run: LiveResponse) -> Response:
        """End a response, unless it ends by itself meanwhile; returns it as it has ended, and is stored.

        Raises `RunMoved` where it is another server's by then.
        """
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_WAIT):
                    if await self.engine.cancel(run.response.id):
                        await run.wait()
        finally:
            self._break_off(run, None)
        if run.response.status in UNENDED:
            raise RunMoved
        await run.saved()
        return run.response

    async def drain(self, seconds: float) -> None:
        """Take nothing on any more, give what runs so many ``seconds``, and end the rest as failed."""
        self.admission.stopping = True
        self.background.release()
        await self.admission.finish(seconds)
        if self.restarts:
            self.background.put_back()
        await self.engine.stop()
        for wait in (STOP_WAIT, LAST_WORDS):  # in the first one a request may still have begun
            await self.admission.finish(wait)
            for run in self.live:
                self._break_off(run, RunInterrupted())

    async def let_go(self) -> None:
        """Leave what others have taken over, because they took this server for dead; its readers may ask them."""
        for run in self.live:
            if run.response.store and not await self._is_still_here(run.response.id) and not run.ended:
                logger.warning("Response %s is another server's now: this one was silent", run.response.id)
                run.hand_over()
                self._call_off(run)

    async def _is_still_here(self, response_id: str) -> bool:
        server = await self.store.runner(response_id)
        return server is not None and server.id == self.store.server_id

    def _break_off(self, run: LiveResponse, error: StageError | None) -> None:
        """End a response that has not ended, and call off the making of it."""
        if run.ended:
            return
        run.break_off(error)
        self._call_off(run)

    def _call_off(self, run: LiveResponse) -> None:
        self.background.interrupt(run.response.id)
        if interrupt := self._interrupts.get(run.response.id):
            interrupt()


def _check_ended(run: LiveResponse) -> None:
    rule(run.ended, "a stream ends with a terminal event: a stage behind persist has lost it")


def _fail(run: LiveResponse, error: Exception) -> None:
    """End a response because of a bug behind `emit`, which ends those of the stages ahead of it."""
    logger.error("Response %s met a bug behind emit, in %s", run.response.id, name_stage(error), exc_info=error)
    run.break_off(error)
