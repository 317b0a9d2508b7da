"""The goals, and what was found of each."""

from __future__ import annotations

import msgspec

from tests.bench.figures import Comparison


class Goal(msgspec.Struct, frozen=True):
    """One line of the table; ``ours`` and ``peer`` are in ``unit``.

    ``most`` and ``ratio`` are what was promised of them: lower is better, unless ``is_rate``.
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

    @property
    def is_met_by_ratio(self) -> bool | None:
        """Whether the promise holds against the peer, which a slow machine leaves alone."""
        if self.ratio is None or self.measured_ratio is None:
            return None
        return self.measured_ratio >= self.ratio if self.is_rate else self.measured_ratio <= self.ratio

    @property
    def is_met(self) -> bool:
        """Whether all that was promised holds here."""
        own = self.ours >= self.most if self.is_rate else self.ours <= self.most
        return own and self.is_met_by_ratio is not False

    @property
    def verdict(self) -> str:
        """In words."""
        if self.is_met:
            return "yes"
        return "by ratio" if self.is_met_by_ratio else "no"


HEAD = "| goal | what | bound | ours | vLLM's | ratio | met |\n|---|---|---|---|---|---|---|"


def row(goal: Goal) -> str:
    """A line of Markdown."""
    sign = "at least" if goal.is_rate else "at most"
    bound = f"{sign} {goal.most:,g} {goal.unit}" + (f", {goal.ratio:g} of vLLM's" if goal.ratio is not None else "")
    peer = "" if goal.peer is None else f"{goal.peer:,.4g}"
    ratio = "" if goal.measured_ratio is None else f"{goal.measured_ratio:.3f}"
    return f"| {goal.name} | {goal.what} | {bound} | {goal.ours:,.4g} | {peer} | {ratio} | {goal.verdict} |"


def token_goal(name: str, what: str, found: Comparison, most: float, ratio: float) -> Goal:
    """Microseconds per token beside the peer's."""
    return Goal(name, what, "us", found.ours.median, most, found.peer.median, found.ratio, ratio)


def growth(deep: Comparison, start: Comparison) -> Goal:
    """P4: what a token costs behind many, over what it costs at the start."""
    ours = deep.ours.median / start.ours.median
    peer = deep.peer.median / start.peer.median
    return Goal("P4", f"a token behind {deep.load['reasoning']:,g} over one at the start", "", ours, 1.1, peer)
