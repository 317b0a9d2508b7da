"""The goals, each with its measured figures."""

from __future__ import annotations

import statistics

import msgspec

from tests.bench.figures import Comparison


class Goal(msgspec.Struct, frozen=True):
    """One line of the table; ``ours`` and ``peer`` are in ``unit``.

    ``most`` and ``ratio`` are the bounds of our figure and of its ratio to the peer's: lower is better, unless
    ``is_rate``.  A bound for the ratio decides if there is one, because a ratio holds on any machine.  ``rounds`` are
    the deciding figures, one per round.
    """

    name: str
    what: str
    unit: str
    ours: float
    most: float
    peer: float | None = None
    measured_ratio: float | None = None
    ratio: float | None = None
    is_rate: bool = False
    rounds: tuple[float, ...] = ()

    @property
    def is_by_ratio(self) -> bool:
        return self.ratio is not None and self.measured_ratio is not None

    def part(self, found: float) -> float:
        """Return a deciding figure as a fraction of its bound: at most 1 if the goal is met."""
        bound = self.ratio if self.is_by_ratio and self.ratio else self.most
        if self.is_rate:
            return bound / found if found else float("inf")
        return found / bound

    @property
    def of_bound(self) -> float:
        return self.part(self.measured_ratio if self.is_by_ratio and self.measured_ratio else self.ours)

    @property
    def peer_of_bound(self) -> float | None:
        """The peer's deciding figure as a fraction of our bound; None if there is none."""
        if self.is_by_ratio:
            return self.part(1.0)
        return None if self.peer is None else self.part(self.peer)

    @property
    def is_close(self) -> bool:
        """True if the bound lies within the middle half of the rounds."""
        if len(self.rounds) < 4:
            return False
        low, _, high = statistics.quantiles(map(self.part, self.rounds), n=4, method="inclusive")
        return low <= 1.0 < high

    @property
    def verdict(self) -> str:
        if self.is_close:
            return "about"
        if self.of_bound > 1.0:
            return "no"
        own = self.ours >= self.most if self.is_rate else self.ours <= self.most
        return "yes" if own else "by ratio"


HEAD = "| goal | what | bound | ours | vLLM's | ratio | met |\n|---|---|---|---|---|---|---|"


def row(goal: Goal) -> str:
    sign = "at least" if goal.is_rate else "at most"
    unit = goal.unit and f" {goal.unit}"
    bound = f"{sign} {goal.most:,g}{unit}" + (f", {goal.ratio:g} of vLLM's" if goal.ratio is not None else "")
    peer = "" if goal.peer is None else f"{figure(goal.peer)}{unit}"
    ratio = "" if goal.measured_ratio is None else f"{goal.measured_ratio:.3f}"
    return f"| {goal.name} | {goal.what} | {bound} | {figure(goal.ours)}{unit} | {peer} | {ratio} | {goal.verdict} |"


def figure(value: float) -> str:
    """Format a number with three digits, or with all digits before the point if there are more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def token_goal(name: str, what: str, found: Comparison, most: float, ratio: float) -> Goal:
    ours, peer = found.ours.median, found.peer.median
    return Goal(name, what, "us", ours, most, peer, found.ratio, ratio, rounds=found.ratios)


def growth(deep: Comparison, start: Comparison) -> Goal:
    """P4: the cost of a token late in a long response, divided by its cost at the start."""
    ours = deep.ours.median / start.ours.median
    peer = deep.peer.median / start.peer.median
    return Goal("P4", f"a token behind {deep.load['reasoning']:,g} over one at the start", "", ours, 1.1, peer)
