"""The waits of conversations, learned for each tool; nothing here does I/O.

A conversation whose model has called a tool waits for that tool, and any other for its client.  The waits of each are
kept as a histogram, in which new ones outweigh old ones.  Few waits say little, so those of all tools, or what has been
published of agents and people, stand beside them.  Each API key has waits of its own, so that none decides what becomes
of another's conversations.  The histograms are in memory: a server learns them in minutes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import NormalDist

CLIENT = ""
"""The name of a wait for the client itself, after an answer without calls."""

CHILD = "\0child"
"""The name of the wait of an agent's child that has answered; no tool has it, nor the next."""

CANCELLED = "\0cancelled"
"""The name of the wait for a client that has cancelled a response."""

SHORTEST = 0.05
"""Seconds of the shortest wait that differs from none."""

EDGES = tuple(SHORTEST * 2 ** (step / 2) for step in range(34))
"""The ends in seconds of the parts of a histogram."""

LONGEST = EDGES[-1]
"""Seconds of the longest wait: longer ones, from 77 minutes on, count as having no end."""

MEMORY = 1_000
"""Waits of a tool after which the older ones count half."""

BELIEF = 8.0
"""Waits of a tool that outweigh what is known of others."""

MOST_NAMES = 100
"""Tools of an API key whose waits are kept: those that were called last."""

MOST_OWNERS = 1_000
"""API keys whose waits are kept: those that waited last."""

RETURNED = 0.9
"""The share of the conversations to come back that are back at the end of an `Outlook`."""


def _published(median: float, share: float, below: float, returning: float) -> tuple[float, ...]:
    """Return the parts of a log-normal distribution, of which only some come back."""
    normal = NormalDist(math.log(median), math.log(below / median) / NormalDist().inv_cdf(share))
    ends = [0.0, *(normal.cdf(math.log(edge)) for edge in EDGES)]
    parts = [returning * (high - low) for low, high in pairwise(ends)]
    return (*parts, 1 - sum(parts))


TOOLS = _published(0.5, 0.9, 9, returning=0.98)
"""Of agents, in TraceLab (https://tracelab.cs.washington.edu)."""

CLIENTS = _published(120, 0.8, 600, returning=0.7)
"""Of people, in ShareChat (https://arxiv.org/abs/2512.17843); with the share that comes back."""

CHILDREN = _published(120, 0.8, 600, returning=0.05)
"""Few children go on after their answer."""

_OWN: Mapping[str, tuple[float, ...]] = {CLIENT: CLIENTS, CHILD: CHILDREN, CANCELLED: CLIENTS}


@dataclass(frozen=True, slots=True)
class Outlook:
    """The prospect of a conversation that waits: with a probability of ``share`` it is back within ``seconds``."""

    share: float
    seconds: float


@dataclass(slots=True)
class _Histogram:
    """The waits for one tool, by the part of `EDGES` that they end in; the last part never ends."""

    counts: list[float] = field(default_factory=lambda: [0.0] * (len(EDGES) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        if self.total >= MEMORY:
            self.counts = [count / 2 for count in self.counts]
            self.total /= 2
        self.counts[bisect_left(EDGES, seconds)] += 1
        self.total += 1

    def beside(self, others: tuple[float, ...]) -> tuple[float, ...]:
        """Return the shares of the parts, in which those of ``others`` count as `BELIEF` waits."""
        return tuple(
            (count + BELIEF * other) / (self.total + BELIEF) for count, other in zip(self.counts, others, strict=True)
        )


class AllWaits:
    """The waits of all API keys."""

    def __init__(self) -> None:
        self._of = OrderedDict[str, Waits]()

    def of(self, owner: str) -> Waits:
        """Return the waits of a key."""
        waits = self._of.setdefault(owner, Waits())
        self._of.move_to_end(owner)
        if len(self._of) > MOST_OWNERS:
            self._of.popitem(last=False)
        return waits


class Waits:
    """The waits of a key for all its tools, for its clients, and of children that have answered."""

    def __init__(self) -> None:
        self._own = {name: _Histogram() for name in _OWN}
        self._tools = _Histogram()
        self._named: OrderedDict[str, _Histogram] = OrderedDict()

    def note(self, what: str, seconds: float) -> None:
        """Take in that a conversation has waited; infinitely long, if it was over instead."""
        if what in self._own:
            self._own[what].add(seconds)
            return
        self._tools.add(seconds)
        self._named.setdefault(what, _Histogram()).add(seconds)
        self._named.move_to_end(what)
        if len(self._named) > MOST_NAMES:
            self._named.popitem(last=False)

    def outlook(self, what: str) -> Outlook:
        """Return the prospect of a conversation that begins to wait."""
        *shares, never = self._shares(what)
        back = list(accumulate(shares))
        at = bisect_left(back, RETURNED * back[-1])
        return Outlook(back[at] / (back[-1] + never), EDGES[at])

    def longest(self, tools: tuple[str, ...]) -> str:
        """Return the one of several tools that is the last to come back."""
        return max(tools, key=lambda tool: self.outlook(tool).seconds)

    def _shares(self, what: str) -> tuple[float, ...]:
        if what in self._own:
            return self._own[what].beside(_OWN[what])
        of_all = self._tools.beside(TOOLS)
        named = self._named.get(what)
        return named.beside(of_all) if named else of_all
