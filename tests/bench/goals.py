"""The goals, each with its measured figures."""

from __future__ import annotations

import statistics

import msgspec

from tests.bench.figures import VLLM, Comparison

AGREEING = 0.25
"""The most by which the middle half of the rounds may spread, as a part of their median."""

UNMEASURABLE = "not measurable here"


class Goal(msgspec.Struct, frozen=True):
    """One line of the table; ``ours`` and ``other`` are in ``unit``.

    ``most`` is the bound of our figure, and ``ratio`` that of our figure divided by ``other``; either is enough.  Lower
    is better, unless ``is_rate``.  ``rounds`` are the figures of each round, or their ratios if ``ratio`` is given.
    """

    name: str
    what: str
    unit: str
    ours: float
    most: float | None = None
    other: float | None = None
    beside: str = VLLM
    ratio: float | None = None
    is_rate: bool = False
    rounds: tuple[float, ...] = ()

    @property
    def measured_ratio(self) -> float | None:
        if not self.other:
            return None
        if self.ratio is not None and self.rounds:
            return statistics.median(self.rounds)
        return self.ours / self.other

    @property
    def compared(self) -> float:
        """The figure that shows a change from one run to another: the ratio, if it has a bound."""
        return self.ours if self.ratio is None or self.measured_ratio is None else self.measured_ratio

    @property
    def of_bound(self) -> float:
        """The figure as a fraction of its bound, the nearer one if it has two: at most 1 if the goal is met."""
        parts = []
        if self.ratio is not None and self.measured_ratio is not None:
            parts.append(self._part(self.measured_ratio, self.ratio))
        if self.most is not None:
            parts.append(self._part(self.ours, self.most))
        return min(parts)

    @property
    def other_of_bound(self) -> float | None:
        """The other's figure as a fraction of our bound; None if there is none."""
        if self.ratio is not None:
            return self._part(1.0, self.ratio)
        return None if self.other is None or self.most is None else self._part(self.other, self.most)

    @property
    def middle(self) -> tuple[float, float] | None:
        """The limits of the middle half of the rounds; None if there are fewer than four."""
        if len(self.rounds) < 4:
            return None
        low, _, high = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return low, high

    @property
    def verdict(self) -> str:
        if self.most is not None and self._part(self.ours, self.most) <= 1.0 and self.ratio is not None:
            return "yes"
        bound, met = self.ratio or self.most, "yes" if self.of_bound <= 1.0 else "no"
        if self.middle is None or bound is None or not self.middle[0] <= bound <= self.middle[1]:
            return met
        low, high = self.middle
        return "about" if high - low <= AGREEING * statistics.median(self.rounds) else UNMEASURABLE

    def _part(self, found: float, bound: float) -> float:
        if self.is_rate:
            return bound / found if found else float("inf")
        return found / bound


HEAD = "| goal | what | bound | ours | beside it | ratio | met |\n|---|---|---|---|---|---|---|"


def row(goal: Goal) -> str:
    unit = goal.unit and f" {goal.unit}"
    bounds = [] if goal.most is None else [f"{goal.most:,g}{unit}"]
    bounds += [] if goal.ratio is None else [f"{goal.ratio:g} of {goal.beside}"]
    bound = f"at {'least' if goal.is_rate else 'most'} {' or '.join(bounds)}"
    other = "" if goal.other is None else f"{goal.beside} {figure(goal.other)}{unit}"
    ratio = "" if goal.measured_ratio is None else f"{goal.measured_ratio:.3g}"
    if ratio and goal.ratio is not None and goal.middle:
        ratio += " ({:.3g} to {:.3g})".format(*goal.middle)
    return f"| {goal.name} | {goal.what} | {bound} | {figure(goal.ours)}{unit} | {other} | {ratio} | {goal.verdict} |"


def figure(value: float) -> str:
    """Format a number with three digits, or with all digits before the point if there are more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def compared(name: str, what: str, found: Comparison, ratio: float, unit: str = "us") -> Goal:
    """Return the goal of a figure and another one that were measured in the same rounds."""
    mine, other = found.ours.median, found.peer.median
    return Goal(name, what, unit, mine, None, other, found.beside, ratio, rounds=found.ratios)


def growth(deep: Comparison, start: Comparison) -> Goal:
    """P4: the cost of a token late in a long response, divided by its cost at the start."""
    rounds = tuple(late / early for late, early in zip(deep.ours.rounds, start.ours.rounds, strict=True))
    other = deep.peer.median / start.peer.median
    what = f"a token behind {deep.load['reasoning']:,g} over one at the start"
    return Goal("P4", what, "", statistics.median(rounds), 1.05, other, rounds=rounds)
