"""The goals: each with its figure, the best peer's, the limit of the machine, and the arithmetic in between."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tests.bench.figures import BARE, JSON, RUST, VLLM, Comparison, Figure

AGREEING = 0.25
"""The most by which the middle half of the rounds may spread, as a part of their median."""

UNMEASURABLE = "not measurable here"


class Bound(msgspec.Struct, frozen=True):
    """The most that a figure may be: itself, or its ratios to another's of the same rounds."""

    most: float
    rounds: tuple[float, ...]

    @property
    def part(self) -> float:
        """The median as a part of the bound: at most 1 if the goal is met."""
        return statistics.median(self.rounds) / self.most

    @property
    def verdict(self) -> str:
        low, high = middle(self.rounds) or (0.0, 0.0)
        if not low <= self.most <= high:
            return "yes" if self.part <= 1.0 else "no"
        return "about" if high - low <= AGREEING * statistics.median(self.rounds) else UNMEASURABLE


class Goal(msgspec.Struct, frozen=True):
    """One line of the table; all figures are in ``unit``, and lower is better.

    ``peer`` has our figure and the best peer's, ``limit`` ours and that of whoever does the least that must be done.
    ``of_peer`` and ``of_limit`` are the most that ours may be of theirs, ``most`` the most that it may be itself.
    ``rest`` says what the difference between goal and limit is for.
    """

    what: str
    unit: str
    ours: Figure
    peer: Comparison | None = None
    of_peer: float | None = None
    limit: Comparison | None = None
    of_limit: float | None = None
    most: float | None = None
    rest: str = ""

    @property
    def bounds(self) -> list[Bound]:
        bounds = [] if self.most is None else [Bound(self.most, self.ours.rounds)]
        for beside, most in ((self.peer, self.of_peer), (self.limit, self.of_limit)):
            if beside is not None and most is not None:
                bounds.append(Bound(most, beside.ratios))
        return bounds

    @property
    def nearest(self) -> Bound:
        """The bound that is missed by most, or met by least."""
        return max(self.bounds, key=lambda bound: bound.part)

    @property
    def allowed(self) -> float:
        """The figure that meets all bounds beside the medians of the others."""
        ends = [] if self.most is None else [self.most]
        for beside, most in ((self.peer, self.of_peer), (self.limit, self.of_limit)):
            if beside is not None and most is not None:
                ends.append(most * beside.peer.median)
        return min(ends)

    @property
    def arithmetic(self) -> str:
        """What the goal is made of: the limit, and what remains."""
        allowed = f"{figure(self.allowed)} {self.unit}"
        if self.limit is None:
            return f"{allowed}: {self.rest}"
        least, rest = self.limit.peer.median, self.allowed - self.limit.peer.median
        if rest < 0:
            return f"{allowed}, below {self.limit.beside} {figure(least)}: out of reach here"
        return f"{allowed}: {self.limit.beside} {figure(least)}, and {figure(rest)} for {self.rest}"


def among(compared: Sequence[Comparison], what: str) -> Mapping[str, Any]:
    """Return the figures of a goal: ours, beside the best of the peers that were measured, and beside the limit."""
    beside = {each.beside: each for each in compared if each.what == what}
    peers = [beside[name] for name in (RUST, VLLM) if name in beside]
    least = [beside[name] for name in (BARE, JSON) if name in beside]
    return {"ours": peers[0].ours, "peer": max(peers, key=lambda each: each.ratio), "limit": least[0]}


HEAD = "|goal|ours|best peer|limit|met|arithmetic|\n|---|---|---|---|---|---|"


def table_row(*cells: str) -> str:
    return f"|{'|'.join(cells)}|"


def row(goal: Goal) -> str:
    ours = f"{figure(goal.ours.median)} {goal.unit}" + ("" if goal.most is None else f", at most {goal.most:g}")
    sides = (beside(goal.peer, goal.of_peer), beside(goal.limit, goal.of_limit))
    return table_row(goal.what, ours, *sides, goal.nearest.verdict, goal.arithmetic)


def beside(found: Comparison | None, most: float | None) -> str:
    """Return our part of the other's figure, with the middle half of its rounds if it has a bound."""
    if found is None:
        return ""
    text = f"{found.ratio:.3g} of {found.beside}"
    if most is None:
        return text
    limits = middle(found.ratios)
    return text + (f" ({limits[0]:.3g} to {limits[1]:.3g})" if limits else "") + f", at most {most:g}"


def middle(rounds: tuple[float, ...]) -> tuple[float, float] | None:
    """Return the limits of the middle half of the rounds; None if there are fewer than four."""
    if len(rounds) < 4:
        return None
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return low, high


def figure(value: float) -> str:
    """Format a number with three digits, or with all digits before the point if there are more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
