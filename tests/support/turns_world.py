"""Models that take turns in virtual time: clients, starts and ends around `Turns`, and the rules that must hold."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from penstock.extensions.models.turns import LONGEST_SLICE, Decision, Member, Turns


@dataclass(frozen=True)
class Plan:
    """All that happens; times are in seconds."""

    sizes: Mapping[str, int]
    models: tuple[PlannedModel, ...]
    clients: tuple[Client, ...]
    until: float


@dataclass(frozen=True)
class PlannedModel:
    groups: frozenset[str]
    starts: float
    ends: float
    priority: int = 0
    fails: bool = False
    """True if each second start fails."""


@dataclass(frozen=True)
class Client:
    """A client that has a lease of a model, thinks, and wants the next one."""

    model: int
    begins: float
    holds: float
    thinks: float
    patience: float | None = None


class Broken(AssertionError):
    """A rule does not hold."""


@dataclass(eq=False)
class _Model:
    plan: PlannedModel
    member: Member
    queue: list[_Request] = field(default_factory=list)
    held: set[_Request] = field(default_factory=set)
    runs: bool = False
    """True from the start of its process to its end."""
    starts: int = 0


@dataclass(eq=False)
class _Request:
    client: Client
    since: float


class World:
    """One run of a plan."""

    def __init__(self, plan: Plan, turns: Callable[[Mapping[str, int], Callable[[], float]], Turns] = Turns) -> None:
        self.now = 0.0
        self.served = 0
        self.swaps = 0
        self.longest_wait = 0.0
        self._plan = plan
        self._turns = turns(plan.sizes, lambda: self.now)
        self._models = [
            _Model(each, self._turns.join(str(number), each.groups, each.priority))
            for number, each in enumerate(plan.models)
        ]
        self._of = {model.member: model for model in self._models}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._is_fair = len({each.priority for each in plan.models}) == 1
        longest = max((each.holds for each in plan.clients), default=0.0)
        starts = max(each.starts + each.ends for each in plan.models)
        self._bound = (len(plan.models) + 1) * 2 * (starts + longest + LONGEST_SLICE)
        """The seconds within which each request has a lease, if all priorities are the same."""

    def run(self) -> None:
        """Run the plan; raises `Broken` if a rule does not hold."""
        for client in self._plan.clients:
            self._at(client.begins, partial(self._want, client))
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
            self._settle()
            self._check()
        if waiting := [model.member.name for model in self._models if model.queue]:
            raise Broken(f"requests wait for {waiting}, and nothing happens any more")

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happen))

    def _settle(self) -> None:
        decision = self._turns.decide()
        self._check_decision(decision)
        for member in decision.starting:
            self._start(self._of[member])
        for member in decision.yielding:
            self._end(self._of[member])
        for model in self._models:
            self._serve(model)
        if self.now < decision.look_at < float("inf"):
            self._at(decision.look_at, lambda: None)

    def _want(self, client: Client) -> None:
        if self.now >= self._plan.until:
            return
        model, request = self._models[client.model], _Request(client, self.now)
        model.queue.append(request)
        if not model.member.is_open:
            self._turns.want(model.member)
        if client.patience is not None:
            self._at(self.now + client.patience, lambda: self._lose_patience(model, request))

    def _lose_patience(self, model: _Model, request: _Request) -> None:
        if request in model.queue:
            model.queue.remove(request)
            self._again(request)
        if not model.queue:
            self._turns.forgo(model.member)

    def _again(self, request: _Request) -> None:
        self._at(self.now + request.client.thinks, lambda: self._want(request.client))

    def _serve(self, model: _Model) -> None:
        if not (model.member.is_open and model.queue):
            return
        for request in model.queue:
            self.served += 1
            self.longest_wait = max(self.longest_wait, self.now - request.since)
            model.held.add(request)
            self._turns.lease(model.member)
            self._at(self.now + request.client.holds, partial(self._release, model, request))
        model.queue.clear()
        self._turns.forgo(model.member)

    def _release(self, model: _Model, request: _Request) -> None:
        if request in model.held:
            model.held.remove(request)
            self._turns.release(model.member)
        self._again(request)

    def _start(self, model: _Model) -> None:
        model.runs = True
        model.starts += 1
        self.swaps += 1
        start = model.starts
        self._at(self.now + model.plan.starts, lambda: self._started(model, start))

    def _started(self, model: _Model, start: int) -> None:
        if not model.runs or model.starts != start or model.member.yields:
            return
        if model.plan.fails and start % 2:
            failed, model.queue = model.queue, []
            for request in failed:
                self._again(request)
            self._turns.forgo(model.member)
            self._ended(model)
        else:
            self._turns.up(model.member)

    def _end(self, model: _Model) -> None:
        model.held.clear()
        self._at(self.now + model.plan.ends, lambda: self._ended(model))

    def _ended(self, model: _Model) -> None:
        model.runs = False
        self._turns.down(model.member)

    def _check_decision(self, decision: Decision) -> None:
        waiting = [model for model in self._models if model.queue and not model.runs]
        for member in decision.yielding:
            if self._of[member].held and not any(each.plan.priority > member.priority for each in waiting):
                raise Broken(f"{member.name} yields under its leases")
        for member in decision.starting:
            starter = self._of[member]
            for other in waiting:
                if other.member not in decision.starting and self._precedes(other, starter):
                    for group in other.plan.groups & starter.plan.groups:
                        if self._up(group) + len([m for m in decision.starting if group in m.groups]) >= self._size(
                            group
                        ):
                            raise Broken(f"{member.name} takes the last place of {group}, for which another one waits")

    @staticmethod
    def _precedes(other: _Model, model: _Model) -> bool:
        """Return True if the first request for another model came before those for a model."""
        return other.plan.priority >= model.plan.priority and other.queue[0].since < model.queue[0].since

    def _up(self, group: str) -> int:
        return len([model for model in self._models if model.runs and group in model.plan.groups])

    def _size(self, group: str) -> int:
        return self._plan.sizes.get(group, 1)

    def _check(self) -> None:
        for group in {group for each in self._plan.models for group in each.groups}:
            if self._up(group) > self._size(group):
                raise Broken(f"more than {self._size(group)} of {group} are up")
        for model in self._models:
            if self._is_fair and any(self.now - request.since > self._bound for request in model.queue):
                raise Broken(f"a request for {model.member.name} waits for too long")
