"""Traces: what crossed each junction of a pipeline, and which frame caused which.

Stages are generators that pull: whatever a stage gives, it gives behind the last frame that it took.  So a tap behind
each stage, which remembers how many frames its neighbour had let through, knows the cause of every frame, whatever the
stages are.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from penstock.pipeline.core import Pipeline
from penstock.pipeline.recordings.format import Abandoned


@dataclass(frozen=True)
class Caused:
    """A frame, and the index of the one that caused it among the frames of the junction ahead.

    Nothing causes the frames of the source, nor what a stage gives ahead of all that it takes.
    """

    frame: Any
    cause: int | None


@dataclass
class Crossed:
    """What crossed the junction behind ``stage``, in order; the first of a trace is that of its source.

    ``raised`` is what came in place of more frames, from this stage or from one ahead of it.
    """

    stage: str
    caused: list[Caused] = field(default_factory=list)
    raised: Exception | None = None

    @property
    def frames(self) -> list[Any]:
        """The frames alone."""
        return [caused.frame for caused in self.caused]


@dataclass
class Trace:
    """All junctions, in order, and the ``error`` that ended the stream, if one did."""

    junctions: list[Crossed]
    error: BaseException | None = None

    @property
    def fault(self) -> tuple[str, Exception] | None:
        """The stage that raised, and what it raised, also where one behind it made an event of it."""
        if self.junctions[0].raised:
            return None
        return next(((crossed.stage, crossed.raised) for crossed in self.junctions if crossed.raised), None)

    def behind(self, stage: str) -> Crossed:
        """The junction behind a stage; raises `LookupError`."""
        for crossed in self.junctions:
            if crossed.stage == stage:
                return crossed
        raise LookupError(f"there is no stage {stage!r} in this trace")


@dataclass(frozen=True)
class _Tap:
    ahead: Crossed | None
    crossed: Crossed

    async def __call__(self, source: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        try:
            async for frame in source:
                cause = len(self.ahead.caused) - 1 if self.ahead and self.ahead.caused else None
                self.crossed.caused.append(Caused(frame, cause))
                yield frame
        except Exception as error:
            self.crossed.raised = error
            raise


async def traced(pipeline: Pipeline[Any, Any], source: AsyncGenerator[Any, None], name: str = "source") -> Trace:
    """Run all of ``source``, which is called ``name``, through the pipeline.

    Composite stages count as one.  What a stage raises ends the trace, and is part of it;
    so is that whoever read the source left.
    """
    junctions = [Crossed(name), *(Crossed(step.name) for step in pipeline.steps)]
    first = junctions[0]
    tapped: Pipeline[Any, Any] = Pipeline.start(f"tap {name}", _Tap(None, first))
    for (ahead, crossed), step in zip(pairwise(junctions), pipeline.steps, strict=True):
        tapped = tapped.then(step.name, step.stage).then(f"tap {step.name}", _Tap(ahead, crossed))
    trace = Trace(junctions)
    async with aclosing(source):
        try:
            async with tapped.open(source) as frames:
                async for _ in frames:
                    pass
        except (Exception, Abandoned) as error:  # noqa: BLE001 - it is told in the trace
            trace.error = error
    return trace
