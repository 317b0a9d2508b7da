"""A simulated engine: a queue, a prefill of one prompt at a time, a batch that decodes, and a cache of prefixes."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from tests.bench.fleet.traffic import Turn

BLOCK = 16
"""Tokens of a block; vLLM's default on a GPU."""


@dataclass(frozen=True)
class Speed:
    """The speed and size of an engine, in the order of gpt-oss-120b on one large GPU."""

    prefill: float = 25_000.0
    """Tokens that it reads in a second."""
    stream: float = 100.0
    """Tokens that a generation gets in a second, if few are running."""
    decode: float = 6_000.0
    """Tokens that all generations get in a second."""
    overhead: float = 0.02
    """Seconds before the first token of a prompt that is cached."""
    cache: int = 1_000_000
    """Tokens of the cache, those of running prompts included."""
    sequences: int = 256


SPEED = Speed()


class Prefixes:
    """The blocks that an engine holds, least recently used first.

    The blocks of a conversation are a chain, which is used as a whole and freed from its end, as vLLM frees it.  So a
    chain is one entry, and the last recently used chain loses its last blocks first: this is the same as a list of
    blocks (see `test_fleet`).  An opening is a chain of its own, which each of its conversations uses.
    """

    def __init__(self, size: int, events: list[tuple[str, int]] | None = None) -> None:
        self.size, self._events = size, events
        self._free = OrderedDict[str, int]()
        self._held = dict[str, tuple[int, int]]()
        self._total = 0

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._total

    @property
    def chains(self) -> set[str]:
        """The names of the chains that it has blocks of."""
        return {*self._free, *self._held}

    def cached(self, opening: str, opening_tokens: int, chain: str) -> int:
        """Return the tokens at the beginning of a prompt that need not be read."""
        whole = blocks(opening_tokens)
        known = min(self._tokens(opening), whole)
        return known if known < whole else whole + self._tokens(chain)

    def hold(self, name: str, tokens: int) -> None:
        """Keep a chain for a running prompt, and grow it to that many tokens."""
        held, holders = self._held.get(name, (0, 0))
        known = held or self._free.pop(name, 0)
        grown = max(known, blocks(tokens))
        self._held[name] = grown, holders + 1
        self._total += grown - known
        self._tell(name, grown)
        while self._total > self.size and self._free:
            oldest = self._least()
            kept = self._free.pop(oldest)
            freed = min(kept, self._total - self.size + BLOCK - 1) // BLOCK * BLOCK
            self._total -= freed
            self._tell(oldest, kept - freed)
            if kept > freed:
                self._free[oldest] = kept - freed
                self._free.move_to_end(oldest, last=False)

    def release(self, name: str, tokens: int = 0) -> None:
        """Let go of a chain, which has grown to that many tokens."""
        held, holders = self._held.pop(name)
        grown = max(held, blocks(tokens))
        self._total += grown - held
        self._tell(name, grown)
        if holders > 1:
            self._held[name] = grown, holders - 1
        else:
            self._free[name] = grown

    def let_go(self, name: str) -> None:
        """Let a chain lose its blocks before all others, unless a prompt runs that has it."""
        if name in self._free:
            self._free.move_to_end(name, last=False)

    def _least(self) -> str:
        """Return the chain that loses blocks next."""
        return next(iter(self._free))

    def _tell(self, name: str, tokens: int) -> None:
        if self._events is not None:
            self._events.append((name, tokens))

    def _tokens(self, name: str) -> int:
        return self._held[name][0] if name in self._held else self._free.get(name, 0)


def blocks(tokens: int) -> int:
    """Return the tokens in whole blocks."""
    return tokens // BLOCK * BLOCK


@dataclass(eq=False, slots=True)
class Engine:
    """One engine; its owner calls it at the times that it returns."""

    number: int
    speed: Speed
    prefixes: Prefixes
    events: list[tuple[str, int]] | None = None
    """The tokens of chains that it holds, after each change; None if nobody listens."""
    waiting: deque[Turn] = field(default_factory=deque)
    reading: Turn | None = None
    read_at: float = 0.0
    """When the prompt that it reads will be read."""
    _writing: list[tuple[float, int, Turn]] = field(default_factory=list)
    """Generations, by the progress of a generation at which each ends."""
    _progress: float = 0.0
    """Tokens that a generation has got that runs since the beginning."""
    _since: float = 0.0
    is_alive: bool = True

    def tell(self) -> None:
        """Keep events for a listener from now on."""
        self.events = []
        self.prefixes = Prefixes(self.speed.cache, self.events)

    @property
    def load(self) -> int:
        """The turns that it has."""
        return len(self.waiting) + len(self._writing) + (self.reading is not None)

    def read_next(self, now: float) -> None:
        """Begin to read the next prompt, if there is a place for it."""
        if self.reading or not self.waiting or len(self._writing) >= self.speed.sequences:
            return
        turn = self.reading = self.waiting.popleft()
        talk = turn.talk
        cached = self.prefixes.cached(talk.opening, talk.opening_tokens, talk.chain)
        turn.cached = min(cached, blocks(turn.prompt - 1))
        self.prefixes.hold(talk.opening, talk.opening_tokens)
        self.prefixes.hold(talk.chain, talk.history + turn.fresh)
        self.read_at = now + self.speed.overhead + (turn.prompt - turn.cached) / self.speed.prefill

    def write(self, now: float) -> Turn:
        """Begin to generate after the prompt that is read."""
        turn, self.reading = self.reading, None
        assert turn is not None
        self._advance(now)
        heapq.heappush(self._writing, (self._progress + turn.answer, turn.talk.number, turn))
        return turn

    def end(self, now: float) -> Turn:
        """End the generation that is next to end."""
        self._advance(now)
        self._progress, _, turn = heapq.heappop(self._writing)
        self.prefixes.release(turn.talk.chain, turn.talk.history + turn.fresh + turn.answer)
        self.prefixes.release(turn.talk.opening)
        return turn

    @property
    def next_at(self) -> float | None:
        """When a prompt is read, or a generation ends, unless another begins before."""
        times = [self.read_at] if self.reading else []
        if self._writing:
            times.append(self._since + (self._writing[0][0] - self._progress) / self._rate)
        return min(times, default=None)

    def die(self) -> list[Turn]:
        """Lose everything; return the turns that it had."""
        lost = [*self.waiting, *(turn for _, _, turn in self._writing), *([self.reading] if self.reading else [])]
        self.waiting.clear()
        self._writing.clear()
        self.reading, self.is_alive, self.prefixes = None, False, Prefixes(self.speed.cache, self.events)
        return lost

    @property
    def _rate(self) -> float:
        return min(self.speed.stream, self.speed.decode / len(self._writing))

    def _advance(self, now: float) -> None:
        if self._writing:
            self._progress += (now - self._since) * self._rate
        self._since = now
