"""The load itself: conversations in a closed or an open loop, and the cost of the generator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from math import inf

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tests.bench.load.client import CANCELLED, Client, Sample
from tests.bench.load.plan import Plan, arrivals
from tests.bench.load.talk import Talk

TICK = 0.01
"""Seconds between two looks at the lag of the event loop."""

PAUSE = 1.0
"""Seconds for which a stream of the closed loop waits after a failure: a server that is gone fails at once."""

SHOWN = 0.2
"""Seconds between two updates of the progress bar."""


@dataclass
class Load:
    """A run of a plan; `stop` ends it early."""

    plan: Plan
    client: Client
    numbers: count[int] = field(default_factory=count)
    """The numbers of the conversations, which decide their content."""
    samples: list[Sample] = field(default_factory=list)
    running: int = 0
    _taken: int = 0
    _begun: float = field(default_factory=time.perf_counter)
    _work: asyncio.Task[None] | None = None

    async def run(self) -> float:
        """Run to the end of the plan, and return the seconds that it took."""
        self._begun = time.perf_counter()
        self._work = asyncio.create_task(self._open() if self.plan.rate else self._closed())
        with suppress(asyncio.CancelledError):
            await self._work
        return time.perf_counter() - self._begun

    def stop(self) -> None:
        """Close all streams, which are not counted."""
        if self._work:
            self._work.cancel()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._begun

    async def _closed(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.plan.streams, self.plan.requests or self.plan.streams)):
                group.create_task(self._one_after_another())

    async def _one_after_another(self) -> None:
        while self._take(self.elapsed):
            if not await self._converse(next(self.numbers), time.perf_counter()):
                await asyncio.sleep(PAUSE)

    async def _open(self) -> None:
        assert self.plan.rate
        end = self.plan.seconds or inf
        async with asyncio.TaskGroup() as group:
            for due in arrivals(self.plan.rate, self.plan.seed):
                await asyncio.sleep(max(0.0, min(due, end) - self.elapsed))
                if not self._take(due):
                    return
                group.create_task(self._converse(next(self.numbers), self._begun + due))

    async def _converse(self, number: int, begun: float) -> bool:
        """Hold a conversation whose first request was taken; it ends early if a request fails or is cancelled.

        Returns False if a request failed.
        """
        talk = Talk(self.plan, number)
        while True:
            self.running += 1
            try:
                sample = await self.client.stream(talk.body(self.client.model), talk.reading(), begun)
            finally:
                self.running -= 1
            self.samples.append(sample)
            final, begun = sample.final, time.perf_counter()
            goes_on = final is not None and talk.goes_on(final) and self._take(self.elapsed)
            if final:
                final.output = []  # it is large
            if not goes_on:
                return sample.has_ended or sample.outcome == CANCELLED

    def _take(self, at: float) -> bool:
        """Take one of the requests of the plan, at that second; return False if none may begin then."""
        if self._taken >= (self.plan.requests or inf) or at >= (self.plan.seconds or inf):
            return False
        self._taken += 1
        return True


@dataclass
class Meter:
    """The cost of the generator itself: its CPU, and the lag of its event loop."""

    lags: list[float] = field(default_factory=list)
    _cpu: float = field(default_factory=time.process_time)

    @property
    def cpu(self) -> float:
        """Seconds of CPU since the start of the meter."""
        return time.process_time() - self._cpu

    async def keep_measuring(self) -> None:
        """Measure the lag until cancelled."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK)
            self.lags.append(max(0.0, time.perf_counter() - before - TICK))


@asynccontextmanager
async def measured() -> AsyncGenerator[Meter, None]:
    """Measure the generator for the length of the block."""
    meter = Meter()
    measuring = asyncio.create_task(meter.keep_measuring())
    try:
        yield meter
    finally:
        measuring.cancel()


@asynccontextmanager
async def shown(load: Load) -> AsyncGenerator[None, None]:
    """Show the progress of a load on standard error for the length of the block."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[state]}")
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=5) as progress:
        plan = load.plan
        bar = progress.add_task("Load", total=plan.requests or plan.seconds, state="")

        def update() -> None:
            failed = sum(not sample.has_ended and sample.outcome != CANCELLED for sample in load.samples)
            of = f" of {plan.requests:,}" if plan.requests else ""
            state = f"{len(load.samples):,}{of} requests, {load.running:,} running, {failed:,} failed"
            progress.update(bar, completed=len(load.samples) if plan.requests else load.elapsed, state=state)

        async def keep_updating() -> None:
            while True:
                update()
                await asyncio.sleep(SHOWN)

        updating = asyncio.create_task(keep_updating())
        try:
            yield
        finally:
            updating.cancel()
            update()
