"""What measuring gives: figures of both servers, taken in turns, and what they say of a goal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import msgspec


class Figure(msgspec.Struct, frozen=True):
    """One thing measured in every round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """What it usually is."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """How far the rounds lie apart, in parts of the median."""
        return (max(self.rounds) - min(self.rounds)) / self.median if self.median else 0.0


class Comparison(msgspec.Struct, frozen=True):
    """Ours beside the peer's, of the same load in the same rounds; ``what`` was measured, if a table has several."""

    load: Mapping[str, float]
    ours: Figure
    peer: Figure
    what: str = ""

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ours to the peer's in each round."""
        return tuple(mine / other for mine, other in zip(self.ours.rounds, self.peer.rounds, strict=True))

    @property
    def ratio(self) -> float:
        """Ours to the peer's, within a round: what a busy machine does to both goes out of it."""
        return statistics.median(self.ratios)
