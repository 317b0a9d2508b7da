"""One response's use of the sandboxes of this server: none before the first call, then one at a time."""

from __future__ import annotations

import asyncio

from penstock.stages.services.sandbox.plan import Plan
from penstock.stages.services.sandbox.probe import Sandbox
from penstock.stages.services.sandbox.process import Process, SandboxDied


class SandboxHost:
    """Lets at most ``most`` responses have a sandbox at once; further ones wait for a free place."""

    def __init__(self, sandbox: Sandbox, most: int = 32) -> None:
        self._plan = sandbox.plan
        self._places = asyncio.Semaphore(most)

    def lease(self) -> SandboxLease:
        """Return a lease for one response; nothing is started yet."""
        return SandboxLease(self._plan, self._places)

    async def close(self) -> None:
        """Do nothing: each session closes its own sandbox."""


class SandboxLease:
    """One of a limited number of places, held from the first call until `close`, and the sandbox in it."""

    def __init__(self, plan: Plan, places: asyncio.Semaphore) -> None:
        self.plan = plan
        self._places = places
        self._holds = False
        self._closed = False
        self._process: Process | None = None
        self.turn = asyncio.Lock()
        """Held during a call, because the calls of one response run one after another."""

    async def process(self, seconds: float) -> Process:
        """Return the sandbox, and start one if there is none.

        A free place and the start may take ``seconds`` in total.  Raises `SandboxDied`.
        """
        if self._process is None:
            try:
                async with asyncio.timeout(seconds):
                    await self._enter()
                    self._process = await Process.start(self.plan)
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
            await process.end()

    async def close(self) -> None:
        self._closed = True
        self.kill()
        try:
            await self.drop()
        finally:
            if self._holds:
                self._holds = False
                self._places.release()

    async def _enter(self) -> None:
        if not self._holds:
            await self._places.acquire()
            self._holds = True
