"""The load itself: conversations in a closed or an open loop."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from math import inf

from tests.bench.load.client import USUAL, Client, Sample
from tests.bench.load.plan import Plan, arrivals
from tests.bench.load.talk import Talk

PAUSE = 1.0
"""Seconds for which a stream of the closed loop waits after a failure: a server that is gone fails at once."""


@dataclass
class Load:
    """A run of a plan; `stop` ends it early."""

    plan: Plan
    client: Client
    numbers: count[int] = field(default_factory=count)
    """The numbers of the conversations, which decide their content."""
    samples: list[Sample] = field(default_factory=list)
    _taken: int = 0
    _begun: float = field(default_factory=time.perf_counter)
    _work: asyncio.Task[None] | None = None

    async def run(self) -> float:
        """Run to the end of the plan, and return the seconds that it took."""
        self._begun = time.perf_counter()
        self._work = asyncio.create_task(self._open() if self.plan.rate else self._closed())
        with suppress(asyncio.CancelledError):  # `stop` was called
            await self._work
        return self._elapsed

    def stop(self) -> None:
        """Close all streams, which are not counted."""
        if self._work:
            self._work.cancel()

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self._begun

    async def _closed(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.plan.streams, self.plan.requests or self.plan.streams)):
                group.create_task(self._one_after_another())

    async def _one_after_another(self) -> None:
        while self._take(self._elapsed):
            if await self._converse(next(self.numbers), time.perf_counter()) not in USUAL:
                await asyncio.sleep(PAUSE)

    async def _open(self) -> None:
        assert self.plan.rate
        end = self.plan.seconds or inf
        async with asyncio.TaskGroup() as group:
            for due in arrivals(self.plan.rate, self.plan.seed):
                await asyncio.sleep(max(0.0, min(due, end) - self._elapsed))
                if not self._take(due):
                    return
                group.create_task(self._converse(next(self.numbers), self._begun + due))

    async def _converse(self, number: int, begun: float) -> str:
        """Hold a conversation whose first request was taken, and return the outcome of its last request."""
        talk = Talk(self.plan, number)
        while True:
            sample = await self.client.stream(talk.body(self.client.model), talk.reading(), begun)
            self.samples.append(sample)
            begun = time.perf_counter()
            goes_on = sample.response and talk.goes_on(sample.response) and self._take(self._elapsed)
            sample.response = {"usage": sample.response.get("usage")}  # the rest is large
            if not goes_on:
                return sample.outcome

    def _take(self, at: float) -> bool:
        """Take one of the requests of the plan, at that second; return False if none may begin then."""
        if self._taken >= (self.plan.requests or inf) or at >= (self.plan.seconds or inf):
            return False
        self._taken += 1
        return True
