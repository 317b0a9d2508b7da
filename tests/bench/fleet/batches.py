"""Lines of batches behind the conversations of a fleet: penstock's own places for lines, and engines with their steps.

One penstock has the places of all engines.  A step of an engine takes longer with each sequence that goes on in it, and
with each token of a prompt that it reads.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import defaultdict, deque
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from penstock.extensions.batches.places import LinePlaces, Rule
from penstock.extensions.batches.places import Turn as LineTurn
from penstock.services.slots import LINES, Slots
from tests.bench.fleet.engine import SPEED, Prefixes, Speed, blocks
from tests.bench.fleet.policies import Affinity
from tests.bench.fleet.traffic import Kind, Talk, Traffic, Turn, constant, lognormal

STEP_TOKENS = 8_192
"""Tokens of a step at most; vLLM's default on a large GPU."""

SAMPLED = 1.0
"""Seconds between two looks at the places."""

SMALL = Speed(prefill=8_000.0, stream=50.0, decode=1_000.0, cache=250_000, sequences=32)
"""The speed and size of an engine on a small GPU."""

LOADS: Mapping[tuple[Speed, str], int] = {
    (SPEED, "day"): 60,
    (SPEED, "night"): 2,
    (SMALL, "day"): 10,
    (SMALL, "night"): 1,
}
"""Open conversations of an engine."""

LINE = Kind(
    "line",
    share=1.0,
    openings=4,
    opening=600,
    requests=constant(1),
    steps=constant(1),
    fresh=lognormal(400, 0.9, 2_000, 8_000),
    answer=lognormal(200, 0.9, 800, 2_000),
    between_steps=constant(0),
    between_requests=constant(0),
)
"""The lines of batches; their lengths are assumptions."""


CONVERSATIONS = 10**4
"""The difference of the numbers of two conversations of which one follows the other, whatever others do."""

LINES_FROM = 10**9
"""The number before that of the first line: no conversation has one so high."""


@dataclass(frozen=True)
class Way:
    """A way to have lines behind other work; ``reserve`` is a share of the places."""

    name: str
    reserve: float | None = None
    can_pause: bool = True
    has_hints: bool = False


WAYS = {
    "alone": None,
    "penstock": Way("**penstock**"),
    "hints": Way("with `--hints`", has_hints=True),
    "quarter": Way("a quarter of the places", 3 / 4),
    "greedy": Way("all places, no pause", 0.0, can_pause=False),
}
"""Ways to have lines, by name; "alone" has none."""


@dataclass(frozen=True)
class BatchesPlan:
    """The plan of a run."""

    way: str
    speed: Speed
    talks: int
    engines: int = 4
    """Few: each of their steps takes time here."""
    warm_up: float = 120.0
    seconds: float = 600.0


def simulate_batches(plan: BatchesPlan) -> BatchesCounts:
    """Run one plan."""
    shift = Shift(plan)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(shift.run())
    return shift.counts


@dataclass
class BatchesCounts:
    """The counts of a run, after its warm-up."""

    plan: BatchesPlan
    waits: dict[tuple[int, int], float] = field(default_factory=dict)
    """Seconds from a turn to its first token, by the conversation and the number of the turn in it."""
    idle: list[int] = field(default_factory=list)
    """The places that conversations leave, once every second."""
    lines: list[int] = field(default_factory=list)
    """Those of them that lines have."""
    tokens: int = 0
    """Tokens that lines get."""

    def against(self, alone: BatchesCounts, quantile: float) -> tuple[float, float]:
        """Return how long turns wait, and how long the same turns wait alone: slower agents ask other turns."""
        both = self.waits.keys() & alone.waits.keys()
        here, there = (sorted(counts.waits[turn] for turn in both) for counts in (self, alone))
        number = int(len(both) * quantile)
        return (here[number], there[number]) if both else (0.0, 0.0)


@dataclass(eq=False)
class Job:
    """A turn at an engine."""

    turn: Turn
    first: asyncio.Future[None]
    """Done with its first token, or its end."""
    done: asyncio.Future[None]
    """Done when it has ended, or is cancelled."""
    unread: int = 0
    first_step: int = 0
    last_step: int = 0
    written: int = 0
    """Its tokens, once it is done."""


class SteppedEngine:
    """An engine with vLLM's steps: each goes on with all that runs, and then reads prompts in their order."""

    def __init__(self, speed: Speed) -> None:
        self._speed, self._prefixes = speed, Prefixes(speed.cache)
        self._waiting, self._reading = deque[Job](), deque[Job]()
        self._writing, self._ends = set[Job](), defaultdict[int, list[Job]](list)
        self._begun, self._cancelled = list[Job](), list[Job]()
        self._step = 0
        self._wakes = asyncio.Event()

    def ask(self, turn: Turn) -> Job:
        """Begin a turn."""
        loop = asyncio.get_running_loop()
        job = Job(turn, loop.create_future(), loop.create_future())
        self._waiting.append(job)
        self._wakes.set()
        return job

    def let_go(self, talk: Talk) -> None:
        """Take the hint that a line has ended: nobody reads its own blocks again."""
        self._prefixes.let_go(talk.chain)

    def cancel(self, job: Job) -> None:
        """End a turn with this step."""
        self._cancelled.append(job)

    async def run(self) -> None:
        """Step for ever."""
        while True:
            if not (self._waiting or self._reading or self._writing):
                self._wakes.clear()
                await self._wakes.wait()
            self._step += 1
            running = len(self._writing)
            tokens = self._read(STEP_TOKENS - running)
            await asyncio.sleep(self._seconds(running, tokens))
            self._end()

    def _seconds(self, running: int, tokens: int) -> float:
        speed = self._speed
        sequence = 1 / speed.decode - 1 / (speed.stream * speed.sequences)
        return 1 / speed.stream + running * sequence + tokens / speed.prefill

    def _read(self, most: int) -> int:
        """Read prompts in this step; return the tokens."""
        room = most
        while room and (self._reading or self._admit()):
            job = self._reading[0]
            tokens = min(room, job.unread)
            room -= tokens
            job.unread -= tokens
            if not job.unread:
                job.first_step, job.last_step = self._step, self._step + job.turn.answer - 1
                self._begun.append(self._reading.popleft())
        return most - room

    def _admit(self) -> bool:
        if not self._waiting or len(self._writing) >= self._speed.sequences:
            return False
        job = self._waiting.popleft()
        turn, talk = job.turn, job.turn.talk
        cached = self._prefixes.cached(talk.opening, talk.opening_tokens, talk.chain)
        turn.cached = min(cached, blocks(turn.prompt - 1))
        job.unread = turn.prompt - turn.cached
        self._prefixes.hold(talk.opening, talk.opening_tokens)
        self._prefixes.hold(talk.chain, talk.history + turn.fresh)
        self._reading.append(job)
        return True

    def _end(self) -> None:
        """End a step: its tokens arrive."""
        for job in self._begun:
            job.first.set_result(None)
            self._ends[job.last_step].append(job)
        self._writing.update(self._begun)
        self._begun.clear()
        for job in self._ends.pop(self._step, ()):
            self._leave(job)
        for job in self._cancelled:
            if not job.done.done():
                self._drop(job)
        self._cancelled.clear()

    def _drop(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            job.done.set_result(None)
            return
        if job in self._writing:
            self._ends[job.last_step].remove(job)
        else:
            self._reading.remove(job)
        self._leave(job)

    def _leave(self, job: Job) -> None:
        turn, talk = job.turn, job.turn.talk
        job.written = self._step - job.first_step + 1 if job in self._writing else 0
        self._writing.discard(job)
        self._prefixes.release(talk.chain, talk.history + turn.fresh + job.written)
        self._prefixes.release(talk.opening)
        job.done.set_result(None)


class Shift:
    """One run."""

    def __init__(self, plan: BatchesPlan) -> None:
        self.plan, self.counts, self._way = plan, BatchesCounts(plan), WAYS[plan.way]
        self._engines = [SteppedEngine(plan.speed) for _ in range(plan.engines)]
        self._policy, self._slots = Affinity(plan.engines, 1), Slots(plan.engines * plan.speed.sequences)
        self._traffic, self._batch = Traffic(plan.engines), Traffic(plan.engines, begun=LINES_FROM)
        self._at_work = dict[LineTurn, tuple[SteppedEngine, Job]]()

    async def run(self) -> None:
        """Run the plan."""
        with patch.object(time, "monotonic", asyncio.get_running_loop().time):
            await self._run()

    async def _run(self) -> None:
        plan, talks = self.plan, self._traffic.open(self.plan.talks * self.plan.engines)
        works = [*(engine.run() for engine in self._engines), *map(self._converse, talks), *self._lines()]
        tasks = [asyncio.create_task(work) for work in works]
        await asyncio.sleep(plan.warm_up)
        while self._now < plan.warm_up + plan.seconds:
            self.counts.idle.append(self._slots.limit - self._slots.load.others)
            self.counts.lines.append(self._slots.held[LINES])
            await asyncio.sleep(SAMPLED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            assert task.cancelled(), task.exception()

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _converse(self, talk: Talk) -> None:
        """Ask all turns of a conversation, and of those after it."""
        gap: float | None = talk.draw.number() / 2**31 * talk.draw.of(talk.kind.between_requests)
        number = 0
        while True:
            if gap is None:
                self._traffic.begun, number = talk.number + CONVERSATIONS, 0
                talk = self._traffic.talk(talk.kind)
                gap = talk.draw.of(talk.kind.between_requests)
            await asyncio.sleep(gap)
            number += 1
            turn = talk.turn(1)
            turn.asked_at = self._now
            async with self._slots.slot(""):
                engine, job = self._ask(turn)
                await job.first
                if turn.asked_at >= self.plan.warm_up:
                    self.counts.waits[talk.number, number] = self._now - turn.asked_at
                await job.done
            self._policy.ended(turn, engine)
            gap = talk.after(turn)

    def _ask(self, turn: Turn) -> tuple[int, Job]:
        number = self._policy.choose(turn, self._now)
        return number, self._engines[number].ask(turn)

    def _lines(self) -> Iterator[Coroutine[Any, Any, None]]:
        if self._way is None:
            return
        reserve = self._way.reserve
        places = LinePlaces(
            self._slots,
            rule=Rule(None if reserve is None else int(reserve * self._slots.limit)),
            others=lambda: self._slots.load.others,
            pause=self._pause,
            is_stopping=lambda: False,
        )
        for _ in range(self._slots.limit):
            yield self._answer(places, self._way)

    async def _answer(self, places: LinePlaces, way: Way) -> None:
        """Answer one line after the other."""
        while True:
            talk = self._batch.talk(LINE)
            turn, line = talk.turn(1), LineTurn(talk.chain, way.can_pause)
            has_begun = False
            while turn.answer:
                await places.enter(line, is_first=has_begun)
                has_begun = True
                number, job = self._ask(turn)
                self._at_work[line] = self._engines[number], job
                if line.is_asked:
                    self._pause(places, line)
                await job.done
                del self._at_work[line]
                places.leave(line)
                self._policy.ended(turn, number)
                self.counts.tokens += job.written if self._now >= self.plan.warm_up else 0
                turn = Turn(talk, turn.fresh + job.written, turn.answer - job.written, 0)
            for engine in self._engines if way.has_hints else ():
                engine.let_go(talk)

    def _pause(self, _: LinePlaces, line: LineTurn) -> None:
        if line in self._at_work:
            engine, job = self._at_work[line]
            engine.cancel(job)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes at once if nothing is left to do before a timer."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.now += timeout or 0.0
        return []
