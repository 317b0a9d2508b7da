"""The versions of a model's weights, as an engine names them at the end of each output."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from penstock.pipeline.protocol.generations import WeightSpan

logger = logging.getLogger(__name__)

LONGEST_VERSION = 64
"""Characters of a version that logs and metrics show."""


class Span(Protocol):
    """A span as an engine gives it: vLLM's `WeightVersionSpan` is one."""

    @property
    def version(self) -> str: ...

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


def spans(given: Iterable[Span] | None, tokens: int) -> tuple[WeightSpan, ...]:
    """Return the spans of the first ``tokens`` of an output, which were passed on, without those that have none."""
    ends = ((span, min(span.end, tokens)) for span in given or ())
    return tuple(WeightSpan(span.version, span.start, end) for span, end in ends if 0 <= span.start < end)


def moved(weights: Sequence[WeightSpan], tokens: int) -> tuple[WeightSpan, ...]:
    """Return the spans of an output that follows a number of other ``tokens``."""
    return tuple(WeightSpan(span.version, span.start + tokens, span.end + tokens) for span in weights)


def joined(before: Sequence[WeightSpan], after: Sequence[WeightSpan]) -> tuple[WeightSpan, ...]:
    """Return the spans of an output of which another engine, or another generation, has written the later ones."""
    if before and after and (before[-1].version, before[-1].end) == (after[0].version, after[0].start):
        return (*before[:-1], WeightSpan(after[0].version, before[-1].start, after[0].end), *after[1:])
    return (*before, *after)


@dataclass
class LatestWeights:
    """The version of the weights of one engine, as far as its outputs have named it."""

    engine: str
    """The name of the engine in the log."""
    version: str = ""
    """The version that it has; empty if no output has named one."""
    _since: float = -inf
    """The time at which this version was first named."""
    _last: float = -inf
    """The time at which it was last named."""

    def note(self, weights: Sequence[WeightSpan], began: float) -> float | None:
        """Take in the spans of a generation that ``began`` at a time, which has ended.

        Return the time at which the version before was last named, if this is another one.  A generation that began
        before the present version was known may end after others, so that it says nothing of the present.
        """
        if not weights or (weights[-1].version != self.version and began < self._since):
            return None
        before, last, now = self.version, self._last, time.monotonic()
        self.version, self._last = weights[-1].version, now
        if before == self.version:
            return None
        self._since = now
        if not before:
            return None
        logger.info("%s writes with weights %s, no longer with %s", self.engine, self.shown, before[:LONGEST_VERSION])
        return last

    @property
    def shown(self) -> str:
        """The version, at a length at which an operator reads it."""
        return self.version[:LONGEST_VERSION]
