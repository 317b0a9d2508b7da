"""The frontend's side of its link to the supervisor."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import uvloop

from penstock.api.frontends.frontend_config import FrontendConfig
from penstock.api.frontends.link import (
    Abort,
    Draining,
    EngineLost,
    Failed,
    FromSupervisor,
    FrontendLost,
    LastConnectionSent,
    Link,
    Received,
    RequestBegun,
    RequestEnded,
    Serving,
    Stop,
)
from penstock.api.http.connections import Runner, take
from penstock.api.runs.scheduler import Scheduler
from penstock.api.settings import Settings
from penstock.api.start.assembly import RunningEngine
from penstock.api.start.backends import of_frontend, start
from penstock.api.start.parts import UNSTARTABLE
from penstock.api.start.serving import drained, serving_requests
from penstock.pipeline.errors import StoreFailed
from penstock.pipeline.logs import log_to_stderr
from penstock.pipeline.tasks import beside
from penstock.server import running
from penstock.services.engines.vllm import VllmEngine
from penstock.stages.models.vllm_private import Greeting
from penstock.stages.recordings.converse import recorded_example

logger = logging.getLogger(__name__)

SIGN = 0.2
"""Seconds between two signs of life."""

LEAVING = 10.0
"""The most seconds for which a frontend that leaves waits until its clients have closed their connections."""

LOOK = 0.05
"""Seconds between two looks at these connections."""


class Frontend:
    """One of several server processes, with the ``config`` that the supervisor gave it."""

    def __init__(self, config: FrontendConfig) -> None:
        self.config = config
        self.link = Link(config.link)
        self.greetings: list[Greeting] = []
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._state = config.share.states[config.share.index]
        self._received = 0
        self._left = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._arriving: set[asyncio.Task[None]] = set()

    def start_engine(self, settings: Settings) -> AbstractAsyncContextManager[RunningEngine]:
        """Use the engine's cores of the supervisor, or the engine elsewhere, for the length of a block."""
        client = self.config.client
        return of_frontend(settings, client, self.watch, self.greetings) if client else start(settings)

    def watch(self, request_id: str, begins: bool) -> None:
        """Tell the supervisor about a request of the engine, so that it is aborted if this process dies."""
        self.link.send(RequestBegun(request_id) if begins else RequestEnded(request_id))

    @asynccontextmanager
    async def attached(self, runner: Runner, scheduler: Scheduler) -> AsyncGenerator[None, None]:
        """Serve connections from the supervisor, and do what it asks for, for the length of a block."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.link, self._receive, runner, scheduler)
        loop.add_signal_handler(signal.SIGTERM, lambda: self._do(self._leave(runner, scheduler)))
        try:
            async with beside(self._give_signs(runner, scheduler)):
                yield
        finally:
            loop.remove_reader(self.link)

    async def _give_signs(self, runner: Runner, scheduler: Scheduler) -> None:
        state = self._state
        while True:
            state.seen_at, state.received, state.open = time.monotonic(), self._received, runner.counts.open
            state.running = len(scheduler.runs.running)
            await asyncio.sleep(SIGN)

    def _receive(self, runner: Runner, scheduler: Scheduler) -> None:
        for received in self.link.received():
            if self.hurry.is_set():  # nothing more is to be received if the supervisor has ended
                asyncio.get_running_loop().remove_reader(self.link)
            if isinstance(received, socket.socket):
                self._received += 1
                self.link.send(Received(self._received))
                arriving = self._do(take(runner, received))
                self._arriving.add(arriving)
                arriving.add_done_callback(self._arriving.discard)
            else:
                self._obey(received, scheduler)

    def _obey(self, message: FromSupervisor, scheduler: Scheduler) -> None:
        match message:
            case Stop():
                (self.hurry if self.stop.is_set() else self.stop).set()
            case LastConnectionSent():
                self._left.set()
            case Abort(request_ids):
                self._do(_abort(scheduler, request_ids))
            case FrontendLost(url):
                self._do(_settle(scheduler, url))
            case EngineLost():
                if isinstance(scheduler.engine, VllmEngine):
                    scheduler.engine.lose()

    async def _leave(self, runner: Runner, scheduler: Scheduler) -> None:
        """Stop alone: clients open new connections at other frontends before requests are refused here."""
        scheduler.in_flight.leaving = True
        if self.link.send(Draining()):
            await self._left.wait()
        deadline = time.monotonic() + LEAVING
        while (self._arriving or runner.counts.open) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK)
        self.stop.set()

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _abort(scheduler: Scheduler, request_ids: Sequence[str]) -> None:
    if isinstance(scheduler.engine, VllmEngine):
        await scheduler.engine.abort_lost(request_ids)


async def _settle(scheduler: Scheduler, url: str) -> None:
    """Take over the responses of a frontend that has died, without waiting for its heartbeats to be missed."""
    with suppress(StoreFailed):  # found later, by the heartbeats
        await scheduler.store.servers.declare_dead(url)
        await scheduler.recovery.recover()


def run_frontend(config: FrontendConfig) -> None:
    """Run one frontend; the supervisor starts a process with this function."""
    config.apply()
    log_to_stderr(config.settings.log_level, as_json=config.settings.log_format == "json")
    try:
        uvloop.run(_serve(Frontend(config)))
    except UNSTARTABLE as error:
        Link(config.link).send(Failed(str(error)))
        sys.exit(1)


async def _serve(frontend: Frontend) -> None:
    config = frontend.config
    async with (
        running(config.settings, frontend.start_engine, config.url, config.siblings, config.share) as server,
        serving_requests(config.settings, server, config.listening, config.metrics) as runner,
        frontend.attached(runner, server.scheduler),
    ):
        example = recorded_example(server.scheduler.pipeline)
        frontend.link.send(Serving(tuple(server.scheduler.engine.models), example, tuple(frontend.greetings)))
        await frontend.stop.wait()
        await drained(config.settings, server.scheduler, frontend.hurry)
