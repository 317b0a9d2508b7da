"""Conversations as people, coding agents and programs hold them.

A conversation is drawn from its number alone, so that every way to choose an engine gets the same conversations.

Where the values come from:

* Turns of people: ShareChat (https://arxiv.org/abs/2512.17843).
* Requests and steps of agents: TraceLab (https://tracelab.cs.washington.edu/exp/session/session_internal_counts/).
* Turns of programs, and gaps: KVCache in the wild (https://arxiv.org/abs/2506.02634); gaps of agents: TraceLab.
* Tokens of turns and answers: WildChat (https://arxiv.org/abs/2405.01470) for people, TraceLab for agents, and the tool
  and agent trace of Mooncake (https://github.com/kvcache-ai/Mooncake) for programs.
* Instructions and tools: Codex for agents, and Mooncake for programs. The use of applications follows Zipf's law.
* The context: Codex compacts at 90% of its window.
* The shares of the kinds, and the instructions of people: assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TypeAlias

STEPS = 2**12
"""Quantiles that stand for a distribution."""

Quantiles: TypeAlias = tuple[float, ...]


def lognormal(median: float, share: float, below: float, most: float = math.inf) -> Quantiles:
    """Return a distribution of this median, a ``share`` of it ``below`` another value, and none above ``most``."""
    sigma = math.log(below / median) / NormalDist().inv_cdf(share)
    normal = NormalDist(math.log(median), sigma)
    return tuple(min(most, math.exp(normal.inv_cdf((step + 0.5) / STEPS))) for step in range(STEPS))


def geometric(mean: float, most: float = math.inf) -> Quantiles:
    """Return the number of trials until the first success, 1 or more."""
    fails = math.log1p(-1 / mean)
    return tuple(min(most, math.ceil(math.log1p(-(step + 0.5) / STEPS) / fails)) for step in range(STEPS))


def constant(value: float) -> Quantiles:
    """Return the distribution of one value."""
    return (value,) * STEPS


class Draw:
    """Random numbers of one conversation, in eight bytes: a congruential generator."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % 2**64
        self.number()

    def number(self) -> int:
        """Return 31 random bits."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return self._state >> 33

    def of(self, quantiles: Quantiles) -> float:
        return quantiles[self.number() >> 19]


@dataclass(frozen=True)
class Kind:
    """A kind of traffic; lengths in tokens, gaps in seconds."""

    name: str
    share: float
    """The share of the conversations that are open at a time."""
    openings: int
    """Instructions and tools that conversations share; with 0, as many as engines."""
    opening: int
    """Tokens of such an opening."""
    requests: Quantiles
    """The requests of a conversation, as one kind of client makes them."""
    steps: Quantiles
    """Turns for a request: one, and one for the result of each call."""
    fresh: Quantiles
    """Tokens that a turn adds to the prompt of the turn before and its answer."""
    answer: Quantiles
    between_steps: Quantiles
    between_requests: Quantiles
    history: int = 0
    """The most tokens of history with which a conversation of the first second begins, as it is in mid-life."""
    context: int = 115_000
    """Tokens of a context, after which it is compacted."""


HOT = "hot"
"""The opening that many programs share."""

COMPACTED = 8_000
"""Tokens that a compaction leaves."""

PEOPLE = lognormal(120, 0.8, 600, 3600)

CHAT = Kind(
    "chat",
    share=0.6,
    openings=20,
    opening=600,
    requests=geometric(3.5),
    steps=constant(1),
    fresh=lognormal(120, 0.9, 700, 16_000),
    answer=lognormal(322, 0.9, 887, 4_000),
    between_steps=constant(0),
    between_requests=PEOPLE,
    history=4_000,
)
AGENT = Kind(
    "agent",
    share=0.3,
    openings=4,
    opening=7_200,
    requests=lognormal(1, 0.9, 18, 137),
    steps=lognormal(2, 0.9, 21, 87),
    fresh=lognormal(400, 0.9, 2_750, 30_000),
    answer=lognormal(200, 0.9, 1_200, 8_000),
    between_steps=lognormal(0.5, 0.9, 9, 600),
    between_requests=PEOPLE,
    history=100_000,
)
PROGRAM = Kind(
    "program",
    share=0.1,
    openings=0,
    opening=5_000,
    requests=constant(1),
    steps=constant(1),
    fresh=lognormal(2_200, 0.9, 8_000, 30_000),
    answer=lognormal(120, 0.9, 400, 2_000),
    between_steps=constant(0),
    between_requests=lognormal(5, 0.8, 10, 60),
)
KINDS = (CHAT, AGENT, PROGRAM)

OTHERS: Mapping[str, tuple[Kind, ...]] = {
    "others of all kinds": KINDS,
    "people": (replace(CHAT, share=0.95), replace(AGENT, share=0.05)),
    "agents": (replace(AGENT, share=0.6),),
    "programs": (replace(CHAT, share=0.3), replace(PROGRAM, share=0.4, openings=5)),
}
"""Mixtures, by name, whose conversations no constant of a choice was tuned with, if they have other numbers."""


@dataclass(eq=False, slots=True)
class Turn:
    """A turn of a conversation; its prompt is the opening, the history and what is fresh."""

    talk: Talk
    fresh: int
    answer: int
    penstock: int
    asked_at: float = 0.0
    cached: int = 0

    @property
    def prompt(self) -> int:
        return self.talk.opening_tokens + self.talk.history + self.fresh


@dataclass(eq=False, slots=True)
class Talk:
    """A conversation, with the tokens that its turns have read and written."""

    number: int
    kind: Kind
    opening: str
    opening_tokens: int
    draw: Draw
    history: int = 0
    requests: int = 1
    steps: int = 1
    compactions: int = 0
    known: object = None
    """The facts of its requests, as penstock reads them; one for all its turns."""

    @property
    def chain(self) -> str:
        """The name of the history, as a prefix cache tells it from others."""
        return f"{self.number}.{self.compactions}"

    def turn(self, penstocks: int) -> Turn:
        """Return the next turn, at any of the penstocks."""
        kind, draw = self.kind, self.draw
        return Turn(self, int(draw.of(kind.fresh)) + 1, int(draw.of(kind.answer)) + 1, draw.number() % penstocks)

    def after(self, turn: Turn) -> float | None:
        """Add a turn that has ended; return the gap until the next one, or None after the last."""
        self.history += turn.fresh + turn.answer
        if self.opening_tokens + self.history > self.kind.context:
            self.history, self.compactions = COMPACTED, self.compactions + 1
        self.steps -= 1
        if self.steps:
            return self.draw.of(self.kind.between_steps)
        self.requests -= 1
        if not self.requests:
            return None
        self.steps = int(self.draw.of(self.kind.steps))
        return self.draw.of(self.kind.between_requests)


@dataclass
class Traffic:
    """The conversations of a fleet: when one ends, another of its kind begins after a gap."""

    engines: int
    hot: float = 0.0
    """The share of programs with the same opening and, at penstock, the same ``prompt_cache_key``."""
    kinds: tuple[Kind, ...] = KINDS
    begun: int = 0

    def open(self, number: int) -> Iterator[Talk]:
        """Yield conversations in mid-life."""
        for kind in self.kinds:
            for _ in range(round(number * kind.share)):
                talk = self.talk(kind)
                talk.history = talk.draw.number() % (kind.history + 1)
                yield talk

    def talk(self, kind: Kind) -> Talk:
        """Return a new conversation."""
        self.begun += 1
        draw = Draw(self.begun)
        requests, steps = int(draw.of(kind.requests)), int(draw.of(kind.steps))
        return Talk(self.begun, kind, self._opening(kind, draw), kind.opening, draw, 0, requests, steps)

    def _opening(self, kind: Kind, draw: Draw) -> str:
        """Return an opening; a few of them have most of the conversations (Zipf's law)."""
        choices, number = kind.openings or self.engines, draw.number() / 2**31
        if kind.name == PROGRAM.name and draw.number() / 2**31 < self.hot:
            return HOT
        return f"{kind.name} {int((choices + 1) ** number)}"
