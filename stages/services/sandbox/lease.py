"""One response's use of the sandboxes of this server: none before the first call, then one at a time."""

from __future__ import annotations

import asyncio
import os
from collections import Counter

from penstock.pipeline.frames import ResolvedRequest
from penstock.stages.services.sandbox.plan import Plan
from penstock.stages.services.sandbox.probe import Sandbox
from penstock.stages.services.sandbox.process import Process, SandboxDied


class Places:
    """The sandboxes that the server may have at once, shared fairly among the owners of responses (API keys).

    An owner may have half of the places, so that one key cannot lock out all others.  A free place goes to the waiting
    owner that has the fewest.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._share = -(-most // 2)
        self._held: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    async def take(self, owner: str) -> None:
        """Wait for a place.  Clients without a key are one owner, the empty one, who may have all."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((owner, turn))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(owner)
            raise
        finally:
            self._waiting = [waiting for waiting in self._waiting if waiting[1] is not turn]

    def give_back(self, owner: str) -> None:
        """Give a place back."""
        self._held[owner] -= 1
        self._free += 1
        self._grant()

    def _grant(self) -> None:
        while self._free and (turns := [turn for turn in self._waiting if self._may_have_one(*turn)]):
            owner, turn = min(turns, key=lambda waiting: self._held[waiting[0]])
            self._free -= 1
            self._held[owner] += 1
            turn.set_result(None)

    def _may_have_one(self, owner: str, turn: asyncio.Future[None]) -> bool:
        return not turn.done() and (not owner or self._held[owner] < self._share)


def places_here() -> Places:
    """Return the places for this machine: more sandboxes at work than this would delay the server."""
    return Places(min(32, 8 * len(os.sched_getaffinity(0))))


class SandboxHost:
    """Gives each response a sandbox from its first call on, when there is a free place."""

    def __init__(self, sandbox: Sandbox, places: Places | None = None) -> None:
        self._plan = sandbox.plan
        self._places = places or places_here()

    def lease(self, request: ResolvedRequest) -> SandboxLease:
        """Return a lease for one response; nothing is started yet."""
        return SandboxLease(self._plan, self._places, request.facts.origin.owner)

    async def close(self) -> None:
        """Do nothing: each session closes its own sandbox."""


class SandboxLease:
    """One of a limited number of places, held from the first call until `close`, and the sandbox in it."""

    def __init__(self, plan: Plan, places: Places, owner: str) -> None:
        self.plan = plan
        self._places = places
        self._owner = owner
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
                self._places.give_back(self._owner)

    async def _enter(self) -> None:
        if not self._holds:
            await self._places.take(self._owner)
            self._holds = True
