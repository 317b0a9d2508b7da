"""Hints for the caches of engines, of sessions of coding agents: penstock's own, beside an oracle that knows all."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from penstock.extensions.hints.talks import Talks
from penstock.services.engines.engine import CacheHint
from tests.bench.fleet.engine import Engine, Prefixes, Speed
from tests.bench.fleet.fleet import Counts, Fleet, Plan
from tests.bench.fleet.policies import Affinity, Informed, LeastLoad, Policy
from tests.bench.fleet.sessions import AGENTS, PERSON, Session, Sessions
from tests.bench.fleet.traffic import Talk, Turn

NODE = Speed(prefill=25_000.0, stream=60.0, decode=4_000.0, cache=3_000_000, sequences=128)
"""The speed and size of an engine on several large GPUs."""

COPIED = 500_000.0
"""Tokens that come from the second tier in a second."""

BEGIN_EVERY = 8.0
"""Seconds between the first turns of two sessions at an engine."""

LOADS = {0: 20, 5_000_000: 34}
"""Open sessions of an engine, by the tokens of its second tier: their histories are some times as many."""

Worth: TypeAlias = Callable[[str], float]


class Known:
    """What is known of the chains in all caches; their names are those of `Session.chain`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.talks = Talks()
        self.will_begin = dict[str, float]()
        """The time at which the next turn of a chain begins; infinite if there is none."""
        self._let_go, self._fetched = set[str](), set[str]()
        self._kept = dict[str, tuple[float, CacheHint]]()

    def take(self, hints: Iterable[CacheHint]) -> None:
        """Take in what penstock tells."""
        for hint in hints:
            chain = hint.response_id
            match hint.action:
                case "let_go":
                    self._let_go.add(chain)
                case "fetch":
                    self._fetched.add(chain)
                case "keep":
                    self._fetched.discard(chain)
                    self._kept[chain] = self.now, hint

    def by_hints(self, chain: str) -> float:
        """Rank chains by the tiers of penstock's scheduler for vLLM; those of one tier go by their last use."""
        if chain in self._let_go:
            return -1.0
        return float(chain in self._fetched)

    def by_waits(self, chain: str) -> float:
        """Rank others by their waits: the shorter the one told and the one so far, the more a chain is worth."""
        rank = self.by_hints(chain)
        if rank or chain not in self._kept:
            return rank or 1.0
        since, hint = self._kept[chain]
        return hint.share / (1 + hint.seconds + self.now - since)

    def by_future(self, chain: str) -> float:
        """Rank chains by their next use, as Belady's algorithm does."""
        return -self.will_begin.get(chain, -inf)


class RankedPrefixes(Prefixes):
    """A cache that frees the chains first that are worth least."""

    def __init__(self, size: int, worth: Worth, events: list[tuple[str, int]] | None = None) -> None:
        super().__init__(size, events)
        self._worth = worth

    def _least(self) -> str:
        return min(self._free, key=self._worth)


@dataclass(eq=False)
class TieredEngine(Engine):
    """An engine with a second tier, which has a copy of all that it has read or written, until that is full, too."""

    worth: Worth | None = None
    second: Prefixes = field(default_factory=lambda: Prefixes(0))
    landing: list[tuple[float, int, Turn]] = field(default_factory=list)
    """Turns whose chain is being copied from the second tier, by the time when it has come."""
    _lane_is_free: float = 0.0

    def cache(self, size: int) -> Prefixes:
        """Return a cache as this engine has it."""
        return Prefixes(size, self.events) if self.worth is None else RankedPrefixes(size, self.worth, self.events)

    def tell(self) -> None:
        self.events = []
        self.prefixes = self.cache(self.speed.cache)

    @property
    def load(self) -> int:
        return super().load + len(self.landing)

    def read_next(self, now: float) -> None:
        while self.landing and self.landing[0][0] <= now:
            turn = heapq.heappop(self.landing)[2]
            self.prefixes.release(turn.talk.chain)
            self.waiting.appendleft(turn)
        while self.waiting and not self.reading and self._copies(self.waiting[0], now):
            self.waiting.popleft()
        super().read_next(now)

    def _copies(self, turn: Turn, now: float) -> bool:
        """Begin to copy what the second tier has of a chain, if it has more than the first."""
        chain = turn.talk.chain
        held, kept = (tier.cached("", 0, chain) for tier in (self.prefixes, self.second))
        if held >= kept:
            return False
        self.prefixes.hold(chain, kept)
        self._lane_is_free = max(now, self._lane_is_free) + (kept - held) / COPIED
        heapq.heappush(self.landing, (self._lane_is_free, turn.talk.number, turn))
        return True

    def end(self, now: float) -> Turn:
        turn = super().end(now)
        if self.second.size:
            chain = turn.talk.chain
            self.second.hold(chain, self.prefixes.cached("", 0, chain))
            self.second.release(chain)
        return turn

    @property
    def next_at(self) -> float | None:
        times = [time for time in (super().next_at, self.landing[0][0] if self.landing else None) if time is not None]
        return min(times, default=None)


@dataclass(frozen=True)
class Way:
    """A way to choose engines, and to rank the chains in their caches: by their last use, unless it is given."""

    name: str
    choice: Callable[[HintedFleet], Policy]
    worth: Callable[[Known], Worth] | None = None


def _informed(fleet: HintedFleet) -> Policy:
    return Informed(fleet.engines, fleet.plan.penstocks, 1.0)


WAYS = {
    "least": Way("least load", lambda fleet: LeastLoad(fleet.plan.engines, fleet.plan.penstocks)),
    "affinity": Way("penstock", lambda fleet: Affinity(fleet.plan.engines, fleet.plan.penstocks, fleet.engines)),
    "events": Way("penstock with `--kv-events`", _informed),
    "hints": Way("the same, and `--hints`", _informed, lambda known: known.by_hints),
    "waits": Way("the same, if caches act on `keep`", _informed, lambda known: known.by_waits),
    "oracle": Way("an oracle", _informed, lambda known: known.by_future),
}


@dataclass(frozen=True)
class HintsPlan(Plan):
    """The plan of a run."""

    way: str = "hints"
    second: int = 0
    """Tokens of the second tier."""


def simulate_hints(plan: HintsPlan) -> Counts:
    """Run one plan."""
    return HintedFleet(plan).run()


class HintedFleet(Fleet):
    """Sessions of coding agents at engines that penstock tells what comes next."""

    def __init__(self, plan: HintsPlan) -> None:
        self.known, self._way, self._second = Known(), WAYS[plan.way], plan.second
        super().__init__(plan, self._made)
        self._sessions = Sessions(plan.first)

    def _made(self, _: Fleet) -> Policy:
        worth = self._way.worth and self._way.worth(self.known)
        engines = [TieredEngine(engine.number, engine.speed, engine.prefixes, worth=worth) for engine in self.engines]
        for engine in engines:
            engine.prefixes, engine.second = engine.cache(engine.speed.cache), engine.cache(self._second)
        self.engines[:] = engines
        return self._way.choice(self)

    def _begin(self) -> None:
        for number, session in enumerate(self._sessions.open(self.plan.talks * self.plan.engines)):
            self._at(number / self.plan.engines * BEGIN_EVERY, self._ask, session)

    def _ask(self, talk: Talk) -> None:
        assert isinstance(talk, Session)
        root = talk.parent or talk
        self._tell(self.known.talks.asked(str(talk.number), str(root.number), talk.prompt, self._now))
        self.known.will_begin[talk.chain] = self._now
        super()._ask(talk)

    def _step(self, engine: Engine) -> None:
        assert isinstance(engine, TieredEngine)
        self.known.now = self._now
        if engine.landing and engine.landing[0][0] <= self._now:
            self._go_on(engine)
        else:
            super()._step(engine)

    def _go_on_after(self, turn: Turn, engine: Engine) -> None:
        session, chain, speed = turn.talk, turn.talk.chain, self.plan.speed
        assert isinstance(session, Session)
        tokens, step = turn.prompt + turn.answer, session.add()
        calls = () if step.call == PERSON else (step.call,)
        self._tell(self.known.talks.answered(str(session.number), chain, calls, tokens, self._now))
        time = self._now + step.gap
        self.known.will_begin[chain] = inf
        if session.is_over:
            self._end(session, time)
            return
        if step.call == AGENTS:
            session.helpers = self._sessions.helpers(session)
            for helper in session.helpers:
                self._at(self._now, self._ask, helper)
            time += max(helper.left(speed) for helper in session.helpers)
        else:
            self._at(time, self._ask, session)
        if session.chain == chain:
            self.known.will_begin[chain] = time

    def _end(self, session: Session, time: float) -> None:
        """Go on after a session: with a new one, or with that which waits for it."""
        parent = session.parent
        if parent is None:
            self._at(time, self._ask, self._sessions.new())
            return
        parent.helpers.remove(session)
        if not parent.helpers:
            self._at(self._now, self._ask, parent)

    def _tell(self, hints: Iterable[CacheHint]) -> None:
        self.known.now = self._now
        self.known.take(hints)
