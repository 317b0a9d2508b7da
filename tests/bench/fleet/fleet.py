"""A fleet: conversations, penstocks that choose engines, and engines, on a virtual clock."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from statistics import mean
from typing import Any

from tests.bench.fleet.engine import SPEED, Engine, Prefixes, Speed, blocks
from tests.bench.fleet.policies import Policy
from tests.bench.fleet.traffic import KINDS, Kind, Talk, Traffic, Turn


@dataclass(frozen=True)
class Plan:
    """The plan of a run: its fleet, its load and its faults."""

    engines: int
    penstocks: int = 1
    talks: int = 60
    """Open conversations for each engine."""
    hot: float = 0.0
    warm_up: float = 600.0
    """Seconds before anything is counted."""
    seconds: float = 600.0
    """Seconds that are counted."""
    dies_at: float | None = None
    """When one engine in a hundred dies, at least one; in seconds."""
    is_back_after: float = 120.0
    speed: Speed = SPEED
    kinds: tuple[Kind, ...] = KINDS
    first: int = 0
    """The number before that of the first conversation: another one draws other conversations."""


@dataclass
class Counts:
    """The counts of a run."""

    turns: int = 0
    prompts: int = 0
    """Tokens of all prompts."""
    cached: int = 0
    again: int = 0
    """Tokens that were read although an engine had read or written them before."""
    waits: list[float] = field(default_factory=list)
    """Seconds from a turn to its first token."""
    peaks: list[float] = field(default_factory=list)
    """The highest load in relation to the mean, once every few seconds."""
    high: list[float] = field(default_factory=list)
    """The load that one engine in a hundred exceeds, in relation to the mean."""

    loads: list[float] = field(default_factory=list)
    """The mean load, once every few seconds."""

    def add(self, turn: Turn, now: float) -> None:
        """Count a turn whose prompt is read."""
        talk = turn.talk
        self.turns += 1
        self.prompts += turn.prompt
        self.cached += turn.cached
        self.again += max(
            0, min(blocks(talk.opening_tokens) + blocks(talk.history), blocks(turn.prompt - 1)) - turn.cached
        )
        self.waits.append(now - turn.asked_at)

    @property
    def share(self) -> float:
        return self.cached / self.prompts if self.prompts else 0.0

    def wait(self, quantile: float) -> float:
        return sorted(self.waits)[int(len(self.waits) * quantile)] if self.waits else 0.0


BUCKET = 10.0
"""Seconds of the counts around a death."""

SAMPLED = 5.0
"""Seconds between two looks at the loads."""


class Fleet:
    """One run of a plan with a way to choose."""

    def __init__(self, plan: Plan, made: Callable[[Fleet], Policy]) -> None:
        self.plan = plan
        self.engines = [Engine(number, plan.speed, Prefixes(plan.speed.cache)) for number in range(plan.engines)]
        self.policy = made(self)
        self.name, self.dead = self.policy.name, 0
        self.lost = Counts()
        """The first turns of conversations, within a minute, after an engine died that had their blocks."""
        self._lost = set[str]()
        self.size = self.size_of_talks = 0
        """Bytes that a penstock keeps to choose, and those of them that grow with the conversations."""
        self.counts = Counts()
        self.buckets = defaultdict[int, Counts](Counts)
        """The counts of each `BUCKET`, beginning when engines die."""
        self._traffic = Traffic(plan.engines, plan.hot, plan.kinds, plan.first)
        self._order, self._versions, self._now = count(), [0] * plan.engines, 0.0
        self._due: list[tuple[float, int, int, Callable[[Any], None], Any]] = []

    def run(self) -> Counts:
        """Run the plan; return what was counted after the warm-up."""
        plan = self.plan
        self._begin()
        self._at(plan.warm_up, self._sample, None)
        if plan.dies_at is not None:
            for engine in self.engines[:: max(1, min(100, plan.engines))]:
                self._at(plan.warm_up + plan.dies_at, self._die, engine)
        while self._due[0][0] < plan.warm_up + plan.seconds:
            self._now, _, version, act, what = heapq.heappop(self._due)
            if not version or self._versions[what.number] == version:
                act(what)
        self.size, self.size_of_talks = self.policy.size()
        return self.counts

    def close(self) -> None:
        """Let go of all but what was counted."""
        self.engines.clear()
        self._due.clear()
        self.policy = Policy()

    def _begin(self) -> None:
        for talk in self._traffic.open(self.plan.talks * self.plan.engines):
            self._at(talk.draw.number() / 2**31 * talk.draw.of(talk.kind.between_requests), self._ask, talk)

    def _at(self, time: float, act: Callable[[Any], None], what: Any, version: int = 0) -> None:
        heapq.heappush(self._due, (time, next(self._order), version, act, what))

    def _ask(self, talk: Talk) -> None:
        turn = talk.turn(self.plan.penstocks)
        turn.asked_at = self._now
        self._send(turn)

    def _send(self, turn: Turn) -> None:
        engine = self.engines[self.policy.choose(turn, self._now)]
        engine.waiting.append(turn)
        self._go_on(engine)

    def _go_on(self, engine: Engine) -> None:
        """Have an engine begin what it can, and come back when it is done with something."""
        engine.read_next(self._now)
        self.policy.heard(engine, self._now)
        self._versions[engine.number] += 1
        if (time := engine.next_at) is not None:
            self._at(time, self._step, engine, self._versions[engine.number])

    def _step(self, engine: Engine) -> None:
        if engine.reading and engine.read_at <= self._now:
            self._count(engine.write(self._now))
        else:
            turn = engine.end(self._now)
            self.policy.ended(turn, engine.number)
            self._go_on_after(turn, engine)
        self._go_on(engine)

    def _go_on_after(self, turn: Turn, engine: Engine) -> None:
        gap = turn.talk.after(turn)
        talk = turn.talk if gap is not None else self._traffic.talk(turn.talk.kind)
        self._at(self._now + (talk.draw.of(talk.kind.between_requests) if gap is None else gap), self._ask, talk)

    def _die(self, engine: Engine) -> None:
        self.dead += 1
        self._lost |= engine.prefixes.chains
        self.policy.alive(engine.number, is_alive=False)
        self._versions[engine.number] += 1
        for turn in engine.die():
            self.policy.ended(turn, engine.number)
            self._send(turn)
        self._at(self._now + self.plan.is_back_after, self._return, engine)

    def _return(self, engine: Engine) -> None:
        engine.is_alive = True
        self.policy.alive(engine.number, is_alive=True)

    def _count(self, turn: Turn) -> None:
        time = self._now - self.plan.warm_up
        if time < 0:
            return
        self.counts.add(turn, self._now)
        if self.plan.dies_at is not None:
            bucket = int((time - self.plan.dies_at) // BUCKET)
            self.buckets[bucket].add(turn, self._now)
            if turn.talk.history and turn.talk.chain in self._lost:
                self._lost.remove(turn.talk.chain)
                self.lost.add(turn, self._now)

    def _sample(self, _: None) -> None:
        loads = sorted(engine.load for engine in self.engines)
        average = mean(loads) or 1
        self.counts.peaks.append(loads[-1] / average)
        self.counts.high.append(loads[int(len(loads) * 0.99)] / average)
        self.counts.loads.append(average)
        self._at(self._now + SAMPLED, self._sample, None)
