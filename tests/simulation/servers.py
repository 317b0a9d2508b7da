"""The servers of a simulation: each is a process that starts, stops, dies, and starts again over the same store."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from aiohttp import web

from penstock.api.cli.command_line import read_settings
from penstock.api.http.connections import Runner
from penstock.api.runs import housekeeping
from penstock.api.settings import Settings
from penstock.api.start.assembly import RunningEngine
from penstock.api.start.parts import UNSTARTABLE, Running
from penstock.api.start.serving import drained
from penstock.extensions.models.start import several
from penstock.extensions.tools.files import file_reader
from penstock.server import running
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.responses import harmony_stages
from tests.simulation.children import OF_SERVER, Children
from tests.simulation.engine import CountingEngine
from tests.simulation.lines import LineWatch
from tests.simulation.loop import PROCESS, Process, SimulatedLoop
from tests.simulation.program_watch import WATCH, ProgramWatch, meter
from tests.simulation.stores import SimulatedStore

setattr(file_reader._Child, "run", lambda child: (child._input.partition(b"\n")[2].decode(),))  # noqa: B010 - no process

housekeeping.PERIOD = 20.0
"""The seconds between two sweeps of the store, which each server makes at its start, too."""

PORT = 8000

LIMITED, AT_ONCE, PER_MINUTE = "limited", 3, 30
"""The table of a key with limits, the responses that it may have at once, and its requests per minute."""

HOOKS_HOST = "10.8.0.1"
"""The address of the receiver of webhooks."""

ALL_HOOKS = "all"
"""The name of the receiver of owners that have none of their own."""

WEBHOOK_SECRET = "secret-of-webhooks"

RESTING = Counter({"Event.wait": 3})
"""The workers of vector stores and of batches, which may wait for a slow disk yet when a server has started."""

OPTIONS = (
    "--no-sandbox",
    "--slow-callback",
    "0s",
    "--max-background",
    "2",
    "--drain-timeout",
    "3s",
    "--keep-alive",
    "5s",
    "--tool",
    f"{meter.__module__}:{meter.__name__}",
)


def settings_of(folder: Path, store: str, host: str, *, resumes: bool, models: Path | None) -> Settings:
    """Return the settings of the server at an address; its keys and its limits are in the folder."""
    files = ("--store", store, "--api-key-file", str(folder / "keys"))
    limits = ("--limits", str(folder / "limits.toml"))
    hooks = ("--webhook", hook_url(ALL_HOOKS), "--allow-address", HOOKS_HOST)
    recovery = ("--resume-interrupted",) if resumes else ()
    several = ("--model-config", str(models)) if models else ()
    with patch.dict(os.environ, PENSTOCK_WEBHOOK_SECRET=WEBHOOK_SECRET):
        return read_settings(
            [*OPTIONS, *files, *limits, *hooks, *recovery, *several, "--peer-url", f"http://{host}:{PORT}"]
        )


def hook_url(owner: str) -> str:
    """Return the URL that gets the webhooks of an owner."""
    return f"http://{HOOKS_HOST}:{PORT}/{owner}"


@dataclass(eq=False)
class SimulatedServer:
    """A server at an address, which has a process while it runs."""

    loop: SimulatedLoop
    store: SimulatedStore
    host: str
    settings: Settings
    delay: Any
    """The delays of its work in threads."""
    when_begun: Callable[[str], None]
    """Called with the owner of each generation that begins."""
    when_wrong: Callable[[str], None]
    """Called with what a model does that it should not."""
    lines: LineWatch
    programs: ProgramWatch
    process: Process | None = None
    running: Running | None = None
    """Its parts, while it serves requests."""
    runner: Runner | None = None
    children: Children = field(init=False)
    idle_tasks: Counter[str] = field(default_factory=Counter)
    """The tasks of its process once it had started."""
    failures: list[BaseException] = field(default_factory=list)
    """The errors for which it ended by itself, such as a store that cannot be opened."""
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.children = Children(self._engine, self._wrong)

    @property
    def engines(self) -> list[CountingEngine]:
        """The engines of its models."""
        return [*self.children.engines.values()]

    def _engine(self, name: str = "") -> CountingEngine:
        return CountingEngine(
            when_begun=self.when_begun,
            when_line=self.lines.begins,
            when_line_ended=self.lines.ends,
            when_wrong=self._wrong,
            name=name,
        )

    def _wrong(self, what: str) -> None:
        if self.is_up:
            self.when_wrong(f"{self.host}: {what}")

    @property
    def url(self) -> str:
        return f"http://{self.host}:{PORT}"

    @property
    def is_up(self) -> bool:
        return self.running is not None

    def start(self) -> None:
        """Start a new process, unless there is one."""
        if self.process is not None:
            return
        self.process = Process(self.host, delay=self.delay)
        self._stopping = asyncio.Event()
        context = copy_context()
        context.run(PROCESS.set, self.process)
        self.children = Children(self._engine, self._wrong)
        context.run(OF_SERVER.set, self.children)
        context.run(WATCH.set, self.programs)
        self._task = self.loop.create_task(self._serve(), context=context, name=self.host)

    async def _serve(self) -> None:
        process = self.process
        assert process
        try:
            async with running(self.settings, self._models, self.url) as server:
                self.runner = Runner(server.api.app(self.settings.max_body_bytes))
                await self.runner.setup()
                await web.TCPSite(self.runner, self.host, PORT).start()
                self.running = server
                await asyncio.sleep(0.1)
                self.idle_tasks = self.tasks() | RESTING
                await self._stopping.wait()
                await drained(self.settings, server.scheduler, asyncio.Event())
                self.running = None
                await self.runner.cleanup()
        except UNSTARTABLE as error:
            self.failures.append(error)
        finally:
            if not process.is_dead:
                self.loop.network.kill(process, resets=False)
                self.process = self.running = None

    def _models(self, settings: Settings) -> AbstractAsyncContextManager[RunningEngine]:
        if settings.models:
            return several(settings)
        engine = self.children.engines[""] = self._engine()
        return nullcontext(RunningEngine(engine, harmony_stages(load_encoding())))

    def tasks(self) -> Counter[str]:
        """Return the tasks of its process, by the names of their functions."""
        assert self.process
        return Counter(getattr(task.get_coro(), "__qualname__", "?") for task in self.process.tasks if not task.done())

    async def stop(self) -> None:
        """Stop as after SIGTERM; raise the error with which its process ended."""
        process, task = self.process, self._task
        if process is None or task is None:
            return
        self._stopping.set()
        while not (task.done() or process.is_dead):
            await asyncio.sleep(0.1)
        if task.done() and (error := task.exception()):
            raise error
        if task.done() and self.children.names:
            self.when_wrong(f"{self.host} has stopped, and left the processes of {self.children.names}")

    def kill(self, *, resets: bool) -> None:
        """Kill the process as kill -9 does: what is committed in the store is left of it.

        Those of its models end by themselves: their guardians have tests of their own.
        """
        if self.process is None:
            return
        self.loop.kill(self.process)
        self.loop.network.kill(self.process, resets=resets)
        self.store.kill(self.process, self.running and self.running.scheduler.store._database)
        self.process = self.running = self._task = None
