"""The goals, and what was found of each."""

from __future__ import annotations

import statistics

import msgspec

from tests.bench.figures import Comparison


class Goal(msgspec.Struct, frozen=True):
    """One line of the table; ``ours`` and ``peer`` are in ``unit``.

    ``most`` and ``ratio`` are what was promised of them: lower is better, unless ``is_rate``.  Where a ratio was
    promised it decides, because it holds on any machine.  ``rounds`` is what was found of that which decides in each.
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
        """Whether it is the ratio that decides."""
        return self.ratio is not None and self.measured_ratio is not None

    def part(self, found: float) -> float:
        """What was found of that which decides, in parts of its bound: at most 1 where that holds."""
        bound = self.ratio if self.is_by_ratio and self.ratio else self.most
        if self.is_rate:
            return bound / found if found else float("inf")
        return found / bound

    @property
    def of_bound(self) -> float:
        """Ours in parts of the bound."""
        return self.part(self.measured_ratio if self.is_by_ratio and self.measured_ratio else self.ours)

    @property
    def peer_of_bound(self) -> float | None:
        """The peer's."""
        if self.is_by_ratio:
            return self.part(1.0)
        return None if self.peer is None else self.part(self.peer)

    @property
    def is_close(self) -> bool:
        """Whether the middle half of the rounds has the bound in it."""
        if len(self.rounds) < 4:
            return False
        low, _, high = statistics.quantiles(map(self.part, self.rounds), n=4, method="inclusive")
        return low <= 1.0 < high

    @property
    def verdict(self) -> str:
        """Whether what was promised holds, in a word or two."""
        if self.is_close:
            return "about"
        if self.of_bound > 1.0:
            return "no"
        own = self.ours >= self.most if self.is_rate else self.ours <= self.most
        return "yes" if own else "by ratio"


HEAD = "| goal | what | bound | ours | vLLM's | ratio | met |\n|---|---|---|---|---|---|---|"


def row(goal: Goal) -> str:
    """A line of Markdown."""
    sign = "at least" if goal.is_rate else "at most"
    unit = goal.unit and f" {goal.unit}"
    bound = f"{sign} {goal.most:,g}{unit}" + (f", {goal.ratio:g} of vLLM's" if goal.ratio is not None else "")
    peer = "" if goal.peer is None else f"{figure(goal.peer)}{unit}"
    ratio = "" if goal.measured_ratio is None else f"{goal.measured_ratio:.3f}"
    return f"| {goal.name} | {goal.what} | {bound} | {figure(goal.ours)}{unit} | {peer} | {ratio} | {goal.verdict} |"


def figure(value: float) -> str:
    """With three digits, or all that are ahead of the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def token_goal(name: str, what: str, found: Comparison, most: float, ratio: float) -> Goal:
    """Microseconds per token beside the peer's."""
    ours, peer = found.ours.median, found.peer.median
    return Goal(name, what, "us", ours, most, peer, found.ratio, ratio, rounds=found.ratios)


def growth(deep: Comparison, start: Comparison) -> Goal:
    """P4: what a token costs behind many, over what it costs at the start."""
    ours = deep.ours.median / start.ours.median
    peer = deep.peer.median / start.peer.median
    return Goal("P4", f"a token behind {deep.load['reasoning']:,g} over one at the start", "", ours, 1.1, peer)
