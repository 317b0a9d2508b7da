"""Figures of one server, and comparisons of two that were measured in turns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

VLLM, RUST, BARE = "vLLM's", "vllm-rs's", "bare aiohttp's"
DISK, SQLITE, FTS = "the bare disk's", "SQLite's", "SQLite's own index's"
JSON, OWN_POST = "`json.loads`'s", "our POST's"
"""What a figure is compared with."""


class Figure(msgspec.Struct, frozen=True):
    """One quantity, measured once per round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        return (max(self.rounds) - min(self.rounds)) / self.median if self.median else 0.0


class Comparison(msgspec.Struct, frozen=True):
    """Our figure and another one for a load in the same rounds; ``what`` names the quantity if a table has several."""

    load: Mapping[str, int | float]
    ours: Figure
    peer: Figure
    what: str = ""
    beside: str = VLLM

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(mine / other for mine, other in zip(self.ours.rounds, self.peer.rounds, strict=True))

    @property
    def ratio(self) -> float:
        """The median of the ratios within a round: a busy machine slows both, which cancels out."""
        return statistics.median(self.ratios)


def over(measured: Mapping[str, Sequence[float]], name: str, other: str) -> tuple[float, ...]:
    """Return the figure ``name`` divided by ``other``, for each round."""
    return tuple(value / beside for value, beside in zip(measured[name], measured[other], strict=True))
