"""Traces: the frames that crossed each junction of a pipeline, and the cause of each.

Stages are generators that pull, so the cause of a frame is the last frame that its stage took before it.  A tap after
each stage finds it for any kind of stage: it counts the frames that the tap before the stage has let through.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from penstock.pipeline.core import Pipeline
from penstock.pipeline.faults import UNKNOWN, name_stage
from penstock.pipeline.recordings.format import Abandoned
from penstock.pipeline.tap import Tap


@dataclass(frozen=True)
class Crossing:
    """A frame, the index of its cause among the frames of the previous junction, and its time.

    ``cause`` is None for a frame of the source, and for a frame that a stage gives before it has taken any.  ``at`` is
    in seconds, and None if no time is known.
    """

    frame: Any
    cause: int | None = None
    at: float | None = None


@dataclass
class Crossed:
    """The frames that crossed the junction after ``stage``, in order.

    The first junction of a trace comes after the source.  ``raised`` is the exception that came instead of more
    frames, from this stage or an earlier one.  ``abandoned`` is True if the next stage left before the end.
    """

    stage: str
    crossings: Sequence[Crossing] = ()
    raised: Exception | None = None
    abandoned: bool = False

    @property
    def frames(self) -> list[Any]:
        """The frames alone."""
        return [crossing.frame for crossing in self.crossings]


@dataclass
class Trace:
    """All junctions, in order, and the ``error`` that ended the stream, if any."""

    junctions: list[Crossed]
    error: BaseException | None = None

    @property
    def fault(self) -> tuple[str, Exception] | None:
        """The stage that raised, and its exception, even if a later stage turned that into an event."""
        if self.junctions[0].raised:
            return None
        for crossed in self.junctions:
            if crossed.raised:
                inner = name_stage(crossed.raised)
                return crossed.stage if inner == UNKNOWN else inner, crossed.raised
        return None

    def after(self, stage: str) -> Crossed:
        """Return the junction after ``stage``; raise `LookupError` if there is none."""
        for crossed in self.junctions:
            if crossed.stage == stage:
                return crossed
        raise LookupError(f"there is no stage {stage!r} in this trace")


@dataclass
class _CauseTap(Tap):
    """A tap that keeps the cause of each frame, too: the last frame that the tap ``previous`` has let through."""

    previous: Tap | None = None
    causes: list[int | None] = field(default_factory=list)

    def keep(self, frame: Any) -> None:
        taken = len(self.previous.frames) if self.previous else 0
        self.causes.append(taken - 1 if taken else None)
        super().keep(frame)

    def crossed(self, stage: str) -> Crossed:
        return Crossed(stage, tuple(map(Crossing, self.frames, self.causes)), self.raised, self.abandoned)


async def traced(pipeline: Pipeline[Any, Any], source: AsyncGenerator[Any, None], name: str = "source") -> Trace:
    """Run all of ``source`` through the pipeline; the trace shows it as ``name``.

    A composite stage counts as one.  An exception ends the trace and is part of it, and so is `Abandoned`: the reader
    of a recorded source left.
    """
    taps = {name: _CauseTap()}
    tapped: Pipeline[Any, Any] = Pipeline.start(f"tap {name}", taps[name])
    for step in pipeline.steps:
        taps[step.name] = _CauseTap(previous=taps[next(reversed(taps))])
        tapped = Pipeline((*tapped.steps, step)).then(f"tap {step.name}", taps[step.name])
    ended: BaseException | None = None
    async with aclosing(source):
        try:
            async with tapped.open(source) as frames:
                async for _ in frames:
                    await asyncio.sleep(0)  # end the callback: a watchdog of the loop then sees the time of one frame
        except (Exception, Abandoned) as error:  # noqa: BLE001 - the trace keeps it
            ended = error
    return Trace([tap.crossed(stage) for stage, tap in taps.items()], ended)
