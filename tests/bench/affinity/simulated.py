"""Simulated engines: how many turns stay with the engine of their conversation, and how uneven the load becomes.

Each conversation has 2 to 10 turns.  A turn, and the time until the next one, take a random time with the same mean.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from random import Random
from statistics import mean, quantiles
from typing import Any

from penstock.pipeline.frames import Origin
from penstock.stages.services.engines.replicas import Replica, Replicas
from tests.support.stored_responses import facts

HEADER = (
    "| engines | running on each | choice | turns at the engine of the last | highest load / mean | p99 of that |"
    "\n|---|---|---|---|---|---|"
)

NO_SESSION: Any = None


@dataclass(eq=False)
class Talk:
    """A conversation, and the engine of its last turn; ``is_running`` says if that turn is running."""

    name: str
    turns: int
    engine: Replica | None = None
    is_running: bool = False

    def lose(self) -> None: ...

    def begin(self, replicas: Replicas) -> bool | None:
        """Begin a turn; return True if it stays with the engine of the last turn, and None if it is the first."""
        before, self.engine = self.engine, replicas.choose(facts(origin=Origin(opening=self.name)), (), ())
        assert self.engine is not None
        self.engine.running.add(self)
        self.is_running = True
        return None if before is None else self.engine is before

    def end(self) -> bool:
        """End the turn; return True if it was the last."""
        assert self.engine is not None
        self.engine.running.discard(self)
        self.is_running, self.turns = False, self.turns - 1
        return not self.turns


@dataclass
class Simulation:
    """Conversations on engines, of which ``running`` generate on each engine on average."""

    engines: int
    running: int
    turns: int = 10_000
    stayed: list[bool] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    def run(self, choice: str) -> str:
        """Simulate; return a row of a table."""
        random, names, order = Random(1), count(), count()
        replicas = Replicas(
            tuple(Replica(f"http://engine-{each}:8000", NO_SESSION, is_healthy=True) for each in range(self.engines))
        )

        def talk() -> Talk:
            return Talk(str(next(names)), random.randint(2, 10))

        due = [(random.expovariate(1), next(order), talk()) for _ in range(2 * self.running * self.engines)]
        heapq.heapify(due)
        for _ in range(2 * self.turns):
            now, _, one = due[0]
            if one.is_running:
                one = talk() if one.end() else one
            else:
                self._count(one.begin(replicas), [len(replica.running) for replica in replicas.all])
            heapq.heapreplace(due, (now + random.expovariate(1), next(order), one))
        peaks = quantiles(self.peaks, n=100)[98]
        row = f"{mean(self.stayed):.0%} | {mean(self.peaks):.2f} | {peaks:.2f}"
        return f"| {self.engines} | {self.running} | {choice} | {row} |"

    def _count(self, stays: bool | None, loads: list[int]) -> None:
        if stays is not None:
            self.stayed.append(stays)
        self.peaks.append(max(loads) / mean(loads))
