"""Models that take turns on the GPUs of several machines, as `Turns` lets them, on a virtual clock.

Each machine is a penstock that starts its models and puts them to sleep; another penstock in front of them chooses the
machine.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf, pi, sin
from random import Random
from typing import Any

from penstock.extensions.models.turns import Member, Turns
from tests.bench.fleet.engine import Engine, Prefixes, Speed
from tests.bench.fleet.policies import Affinity, Policy, RoundRobin
from tests.bench.fleet.traffic import AGENT, CHAT, PROGRAM, Kind, Talk, Traffic, Turn, constant

MACHINE = 8
"""GPUs of a machine; the last one has what is left."""

FEWEST_GPUS = 24
"""GPUs that ten models with fixed shares need at least."""

WAIT = 120.0
"""Seconds after which a request that waits for its model is refused: the machines' ``engine-wait``."""

START = 60.0
WAKES = {1: 4.0, 2: 15.0}
"""Seconds to start a process, and to wake one from each level of sleep."""

ENDS = {0: 3.0, 1: 2.0, 2: 1.0}
"""Seconds to end a process, and to let it sleep at each level."""

SPEED = Speed(prefill=15_000.0, stream=50.0, decode=2_000.0, sequences=128)
"""The speed of each model on its GPUs."""

BURST = 300.0
"""Seconds of a burst."""

REQUEST = replace(AGENT, requests=constant(1), history=30_000)
"""One request to an agent, in a conversation that has a history."""


@dataclass(frozen=True)
class PlannedModel:
    """A model; the numbers are those for a hundred GPUs."""

    name: str
    load: str
    """How its load moves: "shifting", "bursts" or "rare"."""
    gpus: int
    turns: float
    """Turns for each second on average; a rare model has a conversation an hour instead."""
    places: int
    """The places on which it may be up, if models take turns."""
    share: int
    """The places that it has, if each has a fixed share."""


MODELS = (
    PlannedModel("large", "shifting", 4, 1.0, 8, 5),
    PlannedModel("medium", "shifting", 2, 2.0, 16, 9),
    PlannedModel("small", "shifting", 1, 4.0, 32, 20),
    PlannedModel("code", "bursts", 2, 0.5, 10, 5),
    PlannedModel("sight", "bursts", 2, 0.5, 10, 5),
    PlannedModel("translation", "bursts", 1, 0.5, 10, 7),
    PlannedModel("drafts", "bursts", 1, 0.5, 10, 7),
    PlannedModel("law", "rare", 4, 0.0, 1, 1),
    PlannedModel("old", "rare", 2, 0.0, 1, 1),
    PlannedModel("trial", "rare", 1, 0.0, 1, 1),
)

LOADS = tuple(dict.fromkeys(model.load for model in MODELS))

KINDS: dict[str, tuple[Kind, ...]] = {
    "shifting": (CHAT, REQUEST),
    "bursts": (REQUEST, PROGRAM),
    "rare": (CHAT,),
}
"""The conversations of each load, half of the turns of each kind."""

TURNS = {CHAT.name: 3.5, REQUEST.name: 8.0, PROGRAM.name: 1.0}
"""Turns of a conversation on average."""


@dataclass(frozen=True)
class Way:
    """A way to share the GPUs among the models."""

    name: str
    sleep: int = 1
    is_shared: bool = True
    """False if each model has a fixed share of them."""
    turns: type[Turns] = Turns
    front: Callable[[list[Place]], Policy] = lambda places: Affinity(len(places), 1)


MOMENT = 1e-3
"""Seconds in which a model gives leases to all that wait for it."""


class _Hasty(Member):
    """A model that yields as soon as another one waits for its place."""

    @property
    def slice(self) -> float:
        return MOMENT


class SwapAtOnce(Turns):
    """Turns without slices: the first request for another model lets no further one of this model begin."""

    def join(self, name: str, groups: Iterable[str] = (), priority: int = 0) -> Member:
        member = _Hasty(name, frozenset(groups), priority)
        self.members.append(member)
        return member


WAYS = {
    "turns": Way("**penstock**"),
    "turns, level 2": Way("penstock, sleep of level 2", sleep=2),
    "turns, level 0": Way("penstock, no sleep", sleep=0),
    "fixed": Way("one penstock a model", is_shared=False),
    "at once": Way("swap at once", turns=SwapAtOnce),
    "round robin": Way("round robin, swap at once", turns=SwapAtOnce, front=lambda places: RoundRobin(len(places), 1)),
}


@dataclass(frozen=True)
class ModelsPlan:
    """The plan of a run; its loads go through all that they do within its seconds."""

    way: str
    gpus: int = 100
    warm_up: float = 900.0
    seconds: float = 3600.0


@dataclass(eq=False)
class Place:
    """A model on GPUs of a machine."""

    model: PlannedModel
    number: int
    """Its number among those of the model."""
    machine: Turns
    member: Member
    engine: Engine
    queue: list[Turn] = field(default_factory=list)
    has_process: bool = False
    version: int = 0


@dataclass
class Waits:
    """The counts of a run."""

    plan: ModelsPlan
    seconds: dict[str, list[float]] = field(default_factory=lambda: {load: [] for load in LOADS})
    """Seconds from a turn to its first token, by the load of its model; those of refused ones are `WAIT`."""
    refused: int = 0
    swaps: int = 0
    lost: float = 0.0
    """Seconds of GPUs whose model starts, wakes, falls asleep or ends."""

    def wait(self, load: str, quantile: float) -> float:
        waits = sorted(self.seconds[load])
        return waits[int(len(waits) * quantile)] if waits else 0.0

    @property
    def turns(self) -> int:
        return sum(map(len, self.seconds.values()))


def simulate_models(plan: ModelsPlan) -> Waits:
    """Run one plan."""
    machines = Machines(plan)
    machines.run()
    return machines.counts


class Machines:
    """One run."""

    def __init__(self, plan: ModelsPlan) -> None:
        self.plan, self.way = plan, WAYS[plan.way]
        self.counts = Waits(plan)
        self._now, self._order = 0.0, count()
        self._due: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._looks = dict[Turns, float]()
        self._places = {model.name: places for model, places in zip(MODELS, self._placed(), strict=True)}
        self._of = {place.member: place for places in self._places.values() for place in places}
        self._fronts = {name: self.way.front(places) for name, places in self._places.items()}
        self._traffic = Traffic(plan.gpus)
        self._models = dict[Talk, PlannedModel]()

    # The machines

    def _placed(self) -> Iterator[list[Place]]:
        """Give each model its places: on the GPUs with the least load so far, on as many machines as possible."""
        whole, rest = divmod(self.plan.gpus, MACHINE)
        sizes = [MACHINE] * whole + [rest] * (rest > 0)
        turns = [self.way.turns(clock=lambda: self._now) for _ in sizes]
        loads = [[0.0] * size for size in sizes]
        has = Counter[tuple[str, int]]()
        by_model = {model.name: list[Place]() for model in MODELS}
        for model in sorted(MODELS, key=lambda each: -each.gpus):
            number = self._number(model)
            load = self._mean(model) / number + 1e-3
            for _ in range(number):
                ranges = [
                    (
                        has[model.name, machine] * self.way.is_shared,
                        max(loads[machine][first : first + model.gpus]),
                        machine,
                        first,
                    )
                    for machine, size in enumerate(sizes)
                    for first in range(0, size - model.gpus + 1, model.gpus)
                ]
                _, _, machine, first = min(ranges)
                has[model.name, machine] += 1
                for gpu in range(first, first + model.gpus):
                    loads[machine][gpu] += load if self.way.is_shared else inf
                groups = [f"gpu{gpu}" for gpu in range(first, first + model.gpus)]
                member = turns[machine].join(model.name, groups)
                places = by_model[model.name]
                places.append(Place(model, len(places), turns[machine], member, _engine()))
        yield from by_model.values()

    def _number(self, model: PlannedModel) -> int:
        number = model.places if self.way.is_shared else model.share
        return max(1, number * self.plan.gpus // 100)

    def _mean(self, model: PlannedModel) -> float:
        return model.turns * self.plan.gpus / 100

    def _at(self, when: float, act: Callable[[Any], None], what: Any) -> None:
        heapq.heappush(self._due, (when, next(self._order), act, what))

    # The clients

    def run(self) -> None:
        """Run the plan."""
        for when, model, kind in self._arrivals():
            self._at(when, self._begin, (model, kind))
        while self._due and self._due[0][0] < self.plan.warm_up + self.plan.seconds:
            self._now, _, act, what = heapq.heappop(self._due)
            act(what)

    def _arrivals(self) -> Iterator[tuple[float, PlannedModel, Kind]]:
        """Yield the beginnings of all conversations."""
        shifting = [model for model in MODELS if model.load == "shifting"]
        until = self.plan.warm_up + self.plan.seconds
        for number, model in enumerate(MODELS):
            random = Random(number)
            phase = shifting.index(model) / len(shifting) if model in shifting else 0.0
            bursts = [random.uniform(0, until) for _ in range(round(until / BURST / 8) + 1)]
            for kind in KINDS[model.load]:
                mean = self._mean(model) / 2 / TURNS[kind.name] if model.turns else 1 / 3600
                when = 0.0
                most = {"shifting": 2.7, "bursts": 8.0, "rare": 1.0}[model.load]
                while (when := when + random.expovariate(mean * most)) < until:
                    if random.random() * most < _load(model, when / until, phase, when, bursts):
                        yield when, model, kind

    def _begin(self, what: tuple[PlannedModel, Kind]) -> None:
        model, kind = what
        talk = self._traffic.talk(kind)
        talk.history = talk.draw.number() % (kind.history + 1)
        self._models[talk] = model
        self._ask(talk)

    def _ask(self, talk: Talk) -> None:
        turn = talk.turn(1)
        turn.asked_at = self._now
        model = self._models[talk]
        place = self._places[model.name][self._fronts[model.name].choose(turn, self._now)]
        if place.member.is_open:
            self._lease(place, turn)
            return
        place.queue.append(turn)
        place.machine.want(place.member)
        self._at(self._now + WAIT, self._refuse, (place, turn))
        self._settle(place.machine)

    def _refuse(self, what: tuple[Place, Turn]) -> None:
        place, turn = what
        if turn not in place.queue:
            return
        place.queue.remove(turn)
        self._fronts[place.model.name].ended(turn, place.number)
        del self._models[turn.talk]
        if self._is_counted:
            self.counts.refused += 1
            self.counts.seconds[place.model.load].append(WAIT)
        if not place.queue:
            place.machine.forgo(place.member)
            self._settle(place.machine)

    # The models

    def _settle(self, machine: Turns) -> None:
        decision = machine.decide()
        for member in decision.yielding:
            self._end(self._of[member])
        for member in decision.starting:
            self._start(self._of[member])
        for member in machine.members:
            place = self._of[member]
            if place.queue and member.is_open:
                machine.forgo(member)
                for turn in place.queue:
                    self._lease(place, turn)
                place.queue.clear()
        if decision.look_at < inf and self._looks.get(machine, -1.0) != decision.look_at:
            self._looks[machine] = decision.look_at
            self._at(decision.look_at, self._settle, machine)

    def _start(self, place: Place) -> None:
        seconds = WAKES[self.way.sleep] if self.way.sleep and place.has_process else START
        place.has_process = True
        self._lose(place, seconds)
        self.counts.swaps += self._is_counted
        self._at(self._now + seconds, self._up, place)

    def _up(self, place: Place) -> None:
        place.engine = _engine()
        place.machine.up(place.member)
        self._settle(place.machine)

    def _end(self, place: Place) -> None:
        assert not place.engine.load, "it yields under its responses"
        seconds = ENDS[self.way.sleep]
        self._lose(place, seconds)
        self._at(self._now + seconds, self._ended, place)

    def _ended(self, place: Place) -> None:
        place.machine.down(place.member)
        self._settle(place.machine)

    def _lose(self, place: Place, seconds: float) -> None:
        self.counts.lost += seconds * place.model.gpus * self._is_counted

    @property
    def _is_counted(self) -> bool:
        return self._now >= self.plan.warm_up

    # The engines

    def _lease(self, place: Place, turn: Turn) -> None:
        place.machine.lease(place.member)
        place.engine.waiting.append(turn)
        self._go_on(place)

    def _go_on(self, place: Place) -> None:
        place.engine.read_next(self._now)
        place.version += 1
        if (time := place.engine.next_at) is not None:
            self._at(time, self._step, (place, place.version))

    def _step(self, what: tuple[Place, int]) -> None:
        place, version = what
        if version != place.version:
            return
        engine = place.engine
        if engine.reading and engine.read_at <= self._now:
            turn = engine.write(self._now)
            if self._is_counted:
                self.counts.seconds[place.model.load].append(self._now - turn.asked_at)
        else:
            turn = engine.end(self._now)
            self._fronts[place.model.name].ended(turn, place.number)
            self._follow(turn)
            place.machine.release(place.member)
            self._settle(place.machine)
        self._go_on(place)

    def _follow(self, turn: Turn) -> None:
        gap = turn.talk.after(turn)
        if gap is None:
            del self._models[turn.talk]
        else:
            self._at(self._now + gap, self._ask, turn.talk)


def _engine() -> Engine:
    return Engine(0, SPEED, Prefixes(SPEED.cache))


def _load(model: PlannedModel, part: float, phase: float, when: float, bursts: list[float]) -> float:
    """Return the load of a model in relation to its mean."""
    if model.load == "shifting":
        return (1 + sin(2 * pi * (2 * part + phase))) ** 2 / 1.5
    if model.load == "bursts":
        return 8.0 if any(begin <= when < begin + BURST for begin in bursts) else 0.15
    return 1.0
