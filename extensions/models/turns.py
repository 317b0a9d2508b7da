"""Turns of models that exclude each other: of each group at most a number of models is up at once.

`Turns` decides, and knows neither processes nor tasks: its caller says what happens, and carries out what it decides.
`Groups` does so on the event loop.

* Models that wait are served by their priority, then in the order in which they began to wait.  A model takes the
  places of all its groups at once, and the first that waits keeps those that are free for it.
* Another model that is up yields for it: of those without leases the least recently used one.
* If all are in use, one goes on giving leases until it was up for as long as its start took, and at least for
  `SHORTEST_SLICE`.  Then it gives no more, and yields after its last lease.  So swaps take about half of the time.
* Before that, a model between two leases does not yield at once, but after `LINGERS` of that time.
* A model of a lower priority yields at once, even with leases.  One of a higher priority yields only if it was unused
  for as long as its start took.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

SHORTEST_SLICE = 5.0
"""Seconds for which a model that is up gives leases at least, although another one waits for its place."""

LONGEST_SLICE = 120.0
"""Seconds after which it gives no more leases, however long its start took."""

LINGERS = 0.1
"""The share of its slice for which a model waits for its next lease before it yields.

A client that calls a tool comes back soon, and would else find another model up.
"""


@dataclass(eq=False)
class Member:
    """A model, as far as turns are concerned.  Its state is that of `Turns`: others only read it."""

    name: str
    groups: frozenset[str] = frozenset()
    priority: int = 0
    ticket: int | None = None
    """The number by which it waits; None if no request waits for it."""
    has_place: bool = False
    """True from the moment that it may start until its process has ended or sleeps."""
    yields: bool = False
    """True if it has to give up its place, or does so by itself."""
    is_closed: bool = False
    """True if it gives no more leases, because another model waits for its place."""
    placed_at: float = 0.0
    up_at: float | None = None
    """The time since which it can give leases."""
    leases: int = 0
    used_at: float = 0.0

    @property
    def is_open(self) -> bool:
        """True if it gives leases."""
        return self.up_at is not None and not (self.yields or self.is_closed)

    @property
    def is_unused(self) -> bool:
        """True if it has no leases, and no request waits for one."""
        return self.leases == 0 and self.ticket is None

    @property
    def slice(self) -> float:
        """The seconds for which it gives leases although another model waits."""
        started = 0.0 if self.up_at is None else self.up_at - self.placed_at
        return min(max(started, SHORTEST_SLICE), LONGEST_SLICE)


class Decision(NamedTuple):
    """A decision of `Turns`, which its caller carries out."""

    starting: tuple[Member, ...]
    """Models that have got their places: each starts or wakes, and `Turns.up` or `Turns.down` follows."""
    yielding: tuple[Member, ...]
    """Models that give up their places: each sleeps or ends, and `Turns.down` follows."""
    look_at: float
    """The time at which `decide` may decide otherwise, though nothing has happened; infinity if there is none."""


class Turns:
    """Decides which models may be up.

    ``sizes`` has the models of each group that may be up at once; a group that it lacks has one.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.members: list[Member] = []
        self.sizes = dict(sizes or {})
        self._clock = clock
        self._tickets = itertools.count()

    def join(self, name: str, groups: Iterable[str] = (), priority: int = 0) -> Member:
        """Add a model."""
        member = Member(name, frozenset(groups), priority)
        self.members.append(member)
        return member

    def leave(self, member: Member) -> None:
        """Remove a model that is down."""
        self.members.remove(member)

    def want(self, member: Member) -> None:
        """Note that requests wait for a model."""
        if member.ticket is None:
            member.ticket = next(self._tickets)

    def forgo(self, member: Member) -> None:
        """Note that no request waits for a model any more: all have a lease, or have left."""
        member.ticket = None

    def up(self, member: Member) -> None:
        """Note that a model can give leases."""
        member.up_at = member.used_at = self._clock()

    def lease(self, member: Member) -> None:
        """Note a lease of a model that is open."""
        member.leases += 1
        member.used_at = self._clock()

    def release(self, member: Member) -> None:
        """Note the end of a lease that was given since the model is up."""
        member.leases -= 1
        member.used_at = self._clock()

    def give_up(self, member: Member) -> None:
        """Note that a model gives up its place by itself, and gives no more leases."""
        member.yields = True

    def down(self, member: Member) -> None:
        """Note that a model has ended, has not started, or sleeps; its leases have ended."""
        member.has_place = member.yields = member.is_closed = False
        member.up_at = None
        member.leases = 0

    def decide(self) -> Decision:
        """Give places to models that wait, and take places from others for them."""
        return _Round(self.members, self.sizes, self._clock()).decide()


class _Offer(NamedTuple):
    """A way in which a model may give up its place; the least offer is taken first."""

    kind: int
    """0 if it is unused, 1 if its priority is lower, 2 if it is in use."""
    ready_at: float
    """The time from which it gives up its place, not before now; infinity if a lease has to end first."""
    rank: float
    """Of unused ones the time of the last use, of others the priority, or the time at which they close."""


@dataclass(eq=False)
class _Round:
    """One decision."""

    members: list[Member]
    sizes: Mapping[str, int]
    now: float
    coming: dict[str, int] = field(default_factory=dict)
    """The places of each group that yielding models will free, less those kept for models that wait."""
    free: dict[str, int] = field(default_factory=dict)
    claimed: set[Member] = field(default_factory=set)
    look_at: float = inf

    def __post_init__(self) -> None:
        for member in self.members:
            member.is_closed = False
            for group in member.groups:
                self.free.setdefault(group, self.sizes.get(group, 1))
                self.coming.setdefault(group, 0)
                self.free[group] -= member.has_place
                self.coming[group] += member.yields

    def decide(self) -> Decision:
        waiting = (each for each in self.members if each.ticket is not None and not each.has_place)
        starting, yielding = list[Member](), list[Member]()
        for waiter in sorted(waiting, key=lambda each: (-each.priority, each.ticket)):
            yielding += self._victims(waiter)
            if all(self.free[group] > 0 for group in waiter.groups):
                waiter.has_place, waiter.placed_at = True, self.now
                starting.append(waiter)
            for group in waiter.groups:
                kept = self.free if self.free[group] > 0 else self.coming
                kept[group] -= 1
        for member in yielding:
            member.yields = True
        return Decision(tuple(starting), tuple(yielding), self.look_at)

    def _victims(self, waiter: Member) -> list[Member]:
        """Claim the models whose places a waiter needs; return them if all can yield now."""
        victims = dict[Member, _Offer]()
        for group in sorted(waiter.groups):
            while self.free[group] + self.coming[group] <= 0:
                offers = {each: offer for each in self.members if (offer := self._offer(each, group, waiter))}
                if not offers:
                    break
                victim = min(offers, key=lambda each: offers[each])
                victims[victim] = offers[victim]
                self.claimed.add(victim)
                for freed in victim.groups:
                    self.coming[freed] += 1
        if all(offer.ready_at <= self.now for offer in victims.values()) and self._is_complete(waiter):
            return [*victims]
        for victim, offer in victims.items():
            slice_ends = victim.up_at is not None and victim.up_at + victim.slice
            if victim.priority <= waiter.priority and slice_ends is not False:
                victim.is_closed = slice_ends <= self.now
                self._look(slice_ends)
            self._look(offer.ready_at)
        return []

    def _is_complete(self, waiter: Member) -> bool:
        return all(self.free[group] + self.coming[group] > 0 for group in waiter.groups)

    def _look(self, at: float) -> None:
        if at > self.now:
            self.look_at = min(self.look_at, at)

    def _offer(self, member: Member, group: str, waiter: Member) -> _Offer | None:
        """Return how a model may give up its place in a group for a waiter; None if it does not."""
        if group not in member.groups or not member.has_place or member.yields or member in self.claimed:
            return None
        if member.is_unused:
            return _Offer(0, max(self.now, self._rests_until(member, waiter)), member.used_at)
        if member.priority < waiter.priority:
            return _Offer(1, self.now, member.priority)
        if member.priority > waiter.priority or member.up_at is None:
            return None
        ends = member.up_at + member.slice
        return _Offer(2, inf if member.leases else max(self.now, ends), ends)

    def _rests_until(self, member: Member, waiter: Member) -> float:
        """Return the time until which an unused model stays up for its next lease."""
        if member.up_at is None or member.priority < waiter.priority:
            return self.now
        if member.priority > waiter.priority:
            return member.used_at + member.slice
        return min(member.used_at + LINGERS * member.slice, member.up_at + member.slice)


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True)
class Owner:
    """The owner of a model, which carries out decisions about it."""

    start: Callable[[], None]
    give_up: Callable[[], None]
    open: Callable[[], None]
    """Called while requests wait for leases, and the model may give them."""


class Groups:
    """The turns of models on the event loop, which all models of a server share."""

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self.turns = Turns(sizes, _now)
        self._owners: dict[Member, Owner] = {}
        self._next: asyncio.Handle | None = None

    def resize(self, sizes: Mapping[str, int]) -> None:
        """Take other sizes of groups; a model that is up beyond them yields when another one waits."""
        self.turns.sizes = dict(sizes)
        self.settle()

    def join(self, member: Member, owner: Owner) -> None:
        """Tell the owner of a member of ``turns`` what is decided about it."""
        self._owners[member] = owner

    def leave(self, member: Member) -> None:
        """Remove a model that is down."""
        del self._owners[member]
        self.turns.leave(member)
        self.settle()

    def settle(self) -> None:
        """Decide soon, as something has happened."""
        self._decide_at(_now())

    def _decide_at(self, when: float) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = asyncio.get_running_loop().call_later(max(0.0, when - _now()), self._decide)

    def _decide(self) -> None:
        self._next = None
        decision = self.turns.decide()
        for member in decision.yielding:
            self._owners[member].give_up()
        for member in decision.starting:
            self._owners[member].start()
        for member in self.turns.members:
            if member.ticket is not None and member.is_open:
                self._owners[member].open()
        if decision.look_at < inf and self._next is None:
            self._decide_at(decision.look_at)
