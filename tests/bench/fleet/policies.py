"""Ways to choose an engine, as each penstock of a fleet does it by what it knows."""

from __future__ import annotations

import heapq
import tracemalloc
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import islice
from math import inf
from random import Random
from typing import Any

from penstock.pipeline.frames import Origin, RequestFacts
from penstock.services.engines.affinity import Ranking
from penstock.services.engines.replicas import Core, Replica, Replicas
from penstock.services.engines.vllm_http import POLL_INTERVAL
from tests.bench.fleet.engine import BLOCK, Engine, Speed, blocks
from tests.bench.fleet.traffic import HOT, Turn
from tests.support.stored_responses import facts, response

NO_SESSION: Any = None


class Policy:
    """A way to choose an engine; one object stands for all penstocks."""

    name = "none"

    def choose(self, turn: Turn, now: float) -> int:
        """Return the number of an engine that is alive, and count the turn there."""
        raise NotImplementedError

    def heard(self, engine: Engine, now: float) -> None:
        """Take what an engine tells of its cache."""

    def ended(self, turn: Turn, engine: int) -> None:
        """Note that a turn has ended, or was lost with its engine."""

    def alive(self, engine: int, *, is_alive: bool) -> None:
        """Note that an engine has died, or is back."""

    def size(self) -> tuple[int, int]:
        """Return the bytes that a penstock keeps to choose, and those of them that grow with the conversations."""
        return 0, 0


class Generation:
    """A generation of a turn, as penstock counts it at a server."""

    def lose(self) -> None: ...


class Affinity(Policy):
    """The choice of penstock: its own code, with the servers as each penstock knows them.

    Each reads the loads of the engines in ``read``; one that is alone knows them by itself.
    """

    def __init__(self, engines: int, penstocks: int, read: Sequence[Engine] = ()) -> None:
        urls = [f"http://engine-{number}:8000" for number in range(engines)]
        self._read, self._polled = read, 0.0
        self._at = [
            Replicas(tuple(Replica(url, NO_SESSION, is_healthy=True) for url in urls)) for _ in range(penstocks)
        ]
        self._numbers = {url: number for number, url in enumerate(urls)}
        self._running = dict[Turn, tuple[Core, Generation]]()
        self.name = "penstock"

    def size(self) -> tuple[int, int]:
        tracemalloc.start()
        kept = Ranking(list(self._numbers))
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del kept
        return size, 0

    def choose(self, turn: Turn, now: float) -> int:
        if now >= self._polled + POLL_INTERVAL:
            self._poll(now)
        core = self._at[turn.penstock].choose(_facts(turn), turn.prompt, (), (), self._cached(turn, now))
        assert core is not None
        generation = Generation()
        core.running.add(generation)
        self._running[turn] = core, generation
        return self._numbers[core.name]

    def ended(self, turn: Turn, engine: int) -> None:
        core, generation = self._running.pop(turn)
        core.running.discard(generation)

    def _poll(self, now: float) -> None:
        self._polled = now
        for replicas in self._at:
            for replica, engine in zip(replicas.all, self._read, strict=False):
                core = replica.cores[0]
                core.others = engine.load - len(core.running)

    def _cached(self, turn: Turn, now: float) -> Mapping[str, int] | None:
        return None

    def alive(self, engine: int, *, is_alive: bool) -> None:
        for replicas in self._at:
            replicas.all[engine].is_healthy = is_alive


def _facts(turn: Turn) -> RequestFacts:
    talk, name = turn.talk, f"conversation {turn.talk.number}"
    key = talk.opening if talk.opening == HOT else None
    if not talk.history and not talk.compactions:
        return facts(response(name, prompt_cache_key=key))
    if not isinstance(talk.known, RequestFacts):
        talk.known = facts(response(prompt_cache_key=key), origin=Origin(opening=name))
    return talk.known


class Bounded(Policy):
    """The first of a conversation's ranking whose load is below some multiple of the mean; at least 4 are no load."""

    FEW = 4

    def __init__(self, engines: int, penstocks: int, excess: float) -> None:
        self.name = f"home, below {excess:g} of the mean" if excess < inf else "home always"
        self._ranking = Ranking([str(number) for number in range(engines)])
        self._alive, self._excess = [True] * engines, excess
        self._loads, self._sums = [[0] * engines for _ in range(penstocks)], [0] * penstocks

    def choose(self, turn: Turn, now: float) -> int:
        loads, total = self._loads[turn.penstock], self._sums[turn.penstock]
        bound = max(self.FEW, self._excess * (total + 1) / len(loads))
        ranks = (int(engine) for engine in self._ranking.of(_facts(turn)))
        chosen = next(number for number in ranks if self._alive[number] and loads[number] < bound)
        loads[chosen] += 1
        self._sums[turn.penstock] += 1
        return chosen

    def ended(self, turn: Turn, engine: int) -> None:
        self._loads[turn.penstock][engine] -= 1
        self._sums[turn.penstock] -= 1

    def alive(self, engine: int, *, is_alive: bool) -> None:
        self._alive[engine] = is_alive


class RoundRobin(Policy):
    """Each penstock takes one engine after the other."""

    name = "round robin"

    def __init__(self, engines: int, penstocks: int) -> None:
        self._alive = [True] * engines
        self._next = [Random(number).randrange(engines) for number in range(penstocks)]

    def choose(self, turn: Turn, now: float) -> int:
        while True:
            number = self._next[turn.penstock] = (self._next[turn.penstock] + 1) % len(self._alive)
            if self._alive[number]:
                return number

    def alive(self, engine: int, *, is_alive: bool) -> None:
        self._alive[engine] = is_alive


class LeastLoad(Policy):
    """Each penstock takes the engine with the fewest of its own turns, and of those any one."""

    name = "least load"

    def __init__(self, engines: int, penstocks: int) -> None:
        self._random = Random(1)
        self._alive = [True] * engines
        self._loads = [[0] * engines for _ in range(penstocks)]
        self._heaps = [[(0, self._random.random(), number) for number in range(engines)] for _ in range(penstocks)]

    def choose(self, turn: Turn, now: float) -> int:
        loads, heap = self._loads[turn.penstock], self._heaps[turn.penstock]
        while True:
            load, _, number = heap[0]
            if load == loads[number] and self._alive[number]:
                loads[number] += 1
                heapq.heapreplace(heap, (loads[number], self._random.random(), number))
                return number
            heapq.heappop(heap)

    def ended(self, turn: Turn, engine: int) -> None:
        loads = self._loads[turn.penstock]
        loads[engine] -= 1
        heapq.heappush(self._heaps[turn.penstock], (loads[engine], self._random.random(), engine))

    def alive(self, engine: int, *, is_alive: bool) -> None:
        self._alive[engine] = is_alive
        for loads, heap in zip(self._loads, self._heaps, strict=True):
            heapq.heappush(heap, (loads[engine], self._random.random(), engine))


SOME = 8
"""Holders of an opening, and engines besides, that a choice by events looks at."""


class Index:
    """An index of the blocks that each engine holds, from events that arrive late."""

    def __init__(self, engines: Sequence[Engine], delay: float, most: int) -> None:
        self._delay, self._most = delay, most
        for engine in engines:
            engine.tell()
        self._late = deque[tuple[float, str, int, int]]()
        self._holders = dict[str, dict[int, int]]()
        self.blocks = 0

    def cached(self, turn: Turn, now: float) -> dict[int, int]:
        """Return how many tokens of a prompt the holders of its history hold, and some holders of its opening."""
        self._listen(now)
        talk = turn.talk
        histories, openings = self._holders.get(talk.chain, {}), self._holders.get(talk.opening, {})
        whole, cached = blocks(talk.opening_tokens), dict[int, int]()
        for number in (*histories, *islice(reversed(openings), SOME)):
            known = openings.get(number, 0)
            cached[number] = whole + histories.get(number, 0) if known >= whole else known
        return cached

    def heard(self, engine: Engine, now: float) -> None:
        self._late.extend((now + self._delay, name, engine.number, tokens) for name, tokens in engine.events or ())
        if engine.events:
            engine.events.clear()

    def _listen(self, now: float) -> None:
        """Take in the events that have arrived."""
        while self._late and self._late[0][0] <= now:
            _, name, number, tokens = self._late.popleft()
            held = self._holders.pop(name, None) or {}
            self.blocks += (tokens - held.pop(number, 0)) // BLOCK
            if tokens:
                held[number] = tokens
            if held:
                self._holders[name] = held
        while self.blocks > self._most:
            name = next(iter(self._holders))
            self.blocks -= sum(self._holders.pop(name).values()) // BLOCK


class Informed(Affinity):
    """The choice of penstock with ``--kv-events``: its own code, with an index of the simulation."""

    def __init__(self, engines: Sequence[Engine], penstocks: int, delay: float) -> None:
        super().__init__(len(engines), penstocks, engines)
        self._index = Index(engines, delay, 10**9)
        self._urls = list(self._numbers)
        self.name = f"penstock with --kv-events, {delay:g} s late"

    def heard(self, engine: Engine, now: float) -> None:
        self._index.heard(engine, now)

    def _cached(self, turn: Turn, now: float) -> Mapping[str, int] | None:
        return {self._urls[number]: tokens for number, tokens in self._index.cached(turn, now).items()}


class Events(Policy):
    """An index of the blocks that each engine holds, from events that arrive late, and loads that are polled.

    The engine with the least work is chosen: the tokens that it would have to read, and a price for each turn that it
    has.  The candidates are the holders of the history, some holders of the opening, and the least loaded of some.
    """

    PRICE = 0.05
    """Seconds of prefill that a turn more is worth."""

    def __init__(self, engines: Sequence[Engine], penstocks: int, speed: Speed, delay: float, most: int) -> None:
        self.name = f"another index of KV events, {delay:g} s late"
        self._engines, self._speed, self._delay = engines, speed, delay
        self._index = Index(engines, delay, most)
        self._random = Random(1)
        self._polled, self._loads = 0.0, [0] * len(engines)
        self._sent = [Counter[int]() for _ in range(penstocks)]

    def choose(self, turn: Turn, now: float) -> int:
        self._poll(now)
        cached, sent = self._index.cached(turn, now), self._sent[turn.penstock]
        candidates = {*cached, *self._some()}

        def work(number: int) -> float:
            load = self._loads[number] + sent[number]
            return max(0, turn.prompt - cached.get(number, 0)) / self._speed.prefill + self.PRICE * load

        alive = [number for number in candidates if self._engines[number].is_alive]
        while not alive:
            alive = [number for number in self._some() if self._engines[number].is_alive]
        chosen = min(alive, key=work)
        sent[chosen] += 1
        return chosen

    def heard(self, engine: Engine, now: float) -> None:
        self._index.heard(engine, now)

    def size(self) -> tuple[int, int]:
        """Return the bytes of the index: a hash of eight bytes and an engine of four for each block."""
        return self._index.blocks * 12, self._index.blocks * 12

    def _some(self) -> Sequence[int]:
        every = range(len(self._engines))
        return every if len(every) <= SOME else self._random.choices(every, k=SOME)

    def _poll(self, now: float) -> None:
        if now >= self._polled + self._delay:
            self._polled, self._loads = now, [engine.load for engine in self._engines]
            for sent in self._sent:
                sent.clear()
