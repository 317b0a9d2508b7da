"""The host of ``program``: the model writes a program, which calls the tools of the request in a sandbox of its own.

A program is a function of its code and of the outcomes of its calls.  The process that has consumed some of these is
kept only to save time: where there is none, a new one gets them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final
from uuid import uuid4

from penstock.extensions.programs.names import Names
from penstock.extensions.programs.running import Opening, ProgramFailed, RunningProgram
from penstock.extensions.programs.sleeping import PER_SLOT, Sleeping
from penstock.extensions.tools.sandbox.live_containers import new_folder, place_at_work
from penstock.extensions.tools.sandbox.probe import Sandbox, offered
from penstock.extensions.tools.sandbox.process import SandboxDied
from penstock.pipeline import metrics
from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.tasks import in_thread
from penstock.services.slots import Limit, Slots, unlimited
from penstock.services.tools import PROGRAM_TTL, HostSettings, NestedCall, PastCall, Refusal, ToolResult

_NOTHING: Final = "(The program wrote nothing.)"


class ProgramHost:
    """Runs programs: each step when a place for a sandbox is free."""

    def __init__(self, sandbox: Sandbox, slots: Slots, limit: Limit = unlimited, ttl: float = PROGRAM_TTL) -> None:
        self.sleeping = Sleeping(PER_SLOT * slots.limit, ttl)
        self._sandbox = sandbox
        self._slots = slots
        self._limit = limit

    def session(self, request: ResolvedRequest) -> ProgramSession:
        return ProgramSession(self, request)

    async def close(self) -> None:
        await self.sleeping.close()

    async def enter(
        self, held: AsyncExitStack, owner: str, program: RunningProgram | Opening, seconds: float
    ) -> RunningProgram:
        """Hold a place for a sandbox, and return the program, which is started unless it runs; raises `SandboxDied`."""
        try:
            async with asyncio.timeout(seconds):
                await held.enter_async_context(place_at_work(owner, self._slots, self._limit))
                return await self._started(program) if isinstance(program, Opening) else program
        except TimeoutError:
            raise SandboxDied("no sandbox was free in time") from None
        except OSError as exc:
            raise SandboxDied(f"it cannot be started: {exc.strerror}") from None

    async def _started(self, opening: Opening) -> RunningProgram:
        folder = await new_folder()
        try:
            return RunningProgram(await self._sandbox.start(folder), folder, opening)
        except BaseException:
            await asyncio.shield(folder.remove())
            raise


class ProgramSession:
    """One response's use of programs."""

    def __init__(self, host: ProgramHost, request: ResolvedRequest) -> None:
        self._host = host
        self._owner = request.facts.origin.owner
        self._tools = request.facts.tools.in_programs or ()
        self._names: Names | None = None
        self._running: set[RunningProgram] = set()
        self._waiting: dict[str, RunningProgram] = {}
        """The programs that wait, and do not outlive the session, by their calls."""
        self._is_closed = False

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        """Run a program that calls no tools: `advance` is for one that does."""
        call_id = uuid4().hex
        outcome = await self.advance(call_id, text, (), seconds, lambda _: None)
        if isinstance(outcome, ToolResult):
            return outcome
        self._host.sleeping.drop((self._owner, call_id))
        return ToolResult(error="The program calls tools, which is not possible here.")

    async def advance(
        self, call_id: str, code: str, past: Sequence[PastCall], seconds: float, refusal: Refusal
    ) -> tuple[NestedCall, ...] | ToolResult:
        if self._names is None:
            self._names = await in_thread(Names, self._tools)  # it takes seconds for thousands of tools
        key, opening = (self._owner, call_id), Opening(code, self._names)
        program = self._host.sleeping.take(key)
        waits, ended = False, "cancelled"
        try:
            program = await self._usable(program, opening, past)
            async with AsyncExitStack() as held:
                program = await self._host.enter(held, self._owner, program or opening, seconds)
                self._running.add(program)
                self._check_open()
                calls = await program.advance(past, seconds, refusal)
            waits = calls is not None and not self._is_closed
            ended = "completed" if calls is None else ended
        except SandboxDied as exc:
            ended = ended if self._is_closed else "failed"
            if program and not self._is_closed:
                metrics.SANDBOXES_KILLED.labels(program.excess or "died").inc()
            return ToolResult(program.written if program else "", f"The sandbox has ended ({exc}).")
        except ProgramFailed as exc:
            assert program
            ended = {"": "diverged", "timeout": "timeout"}.get(exc.limit, "failed")
            if exc.limit:
                metrics.SANDBOXES_KILLED.labels(exc.limit).inc()
            return ToolResult(program.written, str(exc))
        else:
            return ToolResult(program.written or _NOTHING) if calls is None else calls
        finally:
            if not waits:
                metrics.PROGRAMS.labels(ended).inc()
            if program:
                self._running.discard(program)
                if waits:
                    self._waiting[call_id] = program
                    self._host.sleeping.put(key, program)
                else:
                    await asyncio.shield(self._host.sleeping.end(program))

    async def _usable(
        self, program: RunningProgram | None, opening: Opening, past: Sequence[PastCall]
    ) -> RunningProgram | None:
        """Return a program whose process can go on; None if it has to begin, or to run again from its start."""
        if program:
            fits = await in_thread(program.fits, opening, past)  # arguments and results may be long
            if fits:
                return program
            self._host.sleeping.end(program)
        if past:
            metrics.PROGRAMS.labels("replayed").inc()
        return None

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxDied("the response has ended")

    def keep(self, call_id: str, past: Sequence[PastCall]) -> None:
        if program := self._waiting.pop(call_id, None):
            program.hear(past)

    async def close(self) -> None:
        """End the programs of the session, except those to `keep`."""
        self._is_closed = True
        for program in self._running:
            program.kill()
        while self._waiting:
            self._host.sleeping.drop((self._owner, self._waiting.popitem()[0]))


async def host(settings: HostSettings) -> ProgramHost | None:
    """Return the host, if its sandbox works on this machine."""
    if settings.slots is None or not (sandbox := await offered("program", "Programs")):
        return None
    return ProgramHost(sandbox, settings.slots, settings.limit, settings.program_ttl)
