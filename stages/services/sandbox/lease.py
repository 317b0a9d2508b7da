"""One response's use of the sandboxes of this server: none before the first call, then one at a time."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from penstock.pipeline import metrics
from penstock.pipeline.frames import ResolvedRequest
from penstock.stages.services.sandbox.plan import SandboxLimits
from penstock.stages.services.sandbox.probe import Sandbox
from penstock.stages.services.sandbox.process import Process, SandboxDied
from penstock.stages.services.slots import Limit, Slots, sandbox_slots, unlimited


class SandboxHost:
    """Gives each response a sandbox from its first call on, when a slot is free."""

    def __init__(self, sandbox: Sandbox, slots: Slots | None = None, limit: Limit = unlimited) -> None:
        self._sandbox = sandbox
        self._slots = slots or sandbox_slots()
        self._limit = limit

    def lease(self, request: ResolvedRequest) -> SandboxLease:
        """Return a lease for one response; nothing is started yet."""
        return SandboxLease(self._sandbox, self._slots, request.facts.origin.owner, self._limit)

    async def close(self) -> None:
        """Do nothing: each session closes its own sandbox."""


class SandboxLease:
    """One of a limited number of slots, held from the first call until `close`, and the sandbox in it."""

    def __init__(self, sandbox: Sandbox, slots: Slots, owner: str, limit: Limit = unlimited) -> None:
        self._sandbox = sandbox
        self._slots = slots
        self._owner = owner
        self._limit = limit
        self._held = AsyncExitStack()
        self._holds = False
        self._closed = False
        self._process: Process | None = None
        self.turn = asyncio.Lock()
        """Held during a call, because the calls of one response run one after another."""

    async def process(self, seconds: float) -> Process:
        """Return the sandbox, and start one if there is none.

        A free slot and the start may take ``seconds`` in total.  Raises `SandboxDied`.
        """
        if self._process is None:
            try:
                async with asyncio.timeout(seconds):
                    await self._enter()
                    self._process = await self._sandbox.start()
            except TimeoutError:
                raise SandboxDied("no sandbox was free in time") from None
            except OSError as exc:
                raise SandboxDied(f"it cannot be started: {exc.strerror}") from None
        if self._closed:
            await self.close()
            raise SandboxDied("the response has ended")
        if not self._process.alive:
            raise SandboxDied("it has ended since the latest call")
        return self._process

    @property
    def limits(self) -> SandboxLimits:
        """The limits of the sandbox."""
        return self._sandbox.plan.limits

    @property
    def written(self) -> str:
        return "" if self._process is None else self._process.written

    def kill(self) -> None:
        """End the sandbox without waiting for it."""
        if self._process is not None:
            self._process.kill()

    async def drop(self) -> None:
        """End the sandbox and wait for it; the next call starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            if not self._closed:
                metrics.SANDBOXES_KILLED.labels(process.excess or ("timeout" if process.alive else "died")).inc()
            await process.end()

    async def close(self) -> None:
        self._closed = True
        self.kill()
        try:
            await self.drop()
        finally:
            self._holds = False
            await self._held.aclose()

    async def _enter(self) -> None:
        if not self._holds:
            with metrics.SANDBOXES_WAITING.track_inprogress():
                async with AsyncExitStack() as held:
                    await held.enter_async_context(self._limit(self._owner))
                    await held.enter_async_context(self._slots.slot(self._owner))
                    self._held = held.pop_all()
            self._held.enter_context(metrics.SANDBOXES.track_inprogress())
            self._holds = True
