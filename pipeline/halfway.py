"""A pipeline that is opened in two halves, so that something can be decided between them; its stages do not notice.

The first half gives its first frame, and stays open.  The second half reads that frame, and then whatever the first
half still gives.  So each stage runs once, and the code after its loop runs when the second half asks for more.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.pipeline.core import Pipeline
from penstock.pipeline.faults import first

In = TypeVar("In")
Frame = TypeVar("Frame")


async def handed_over(frames: list[Frame]) -> AsyncGenerator[Frame, None]:
    """Yield ``frames`` as a source that holds none of them once it has given it: a frame may be large."""
    while frames:
        yield frames.pop(0)


@dataclass(eq=False, slots=True)
class Halfway(Generic[Frame]):
    """The first half of a pipeline, which is open: the ``frame`` that it has given, and the ``rest``."""

    frame: Frame
    rest: AsyncIterator[Frame]

    async def going_on(self, frame: Frame) -> AsyncGenerator[Frame, None]:
        """Yield ``frame`` in place of the first one, and then the rest: the source of the second half."""
        waiting = [frame]
        del frame  # the stages after it may hold it for less long
        yield waiting.pop()
        async for more in self.rest:
            yield more

    async def finish(self) -> None:
        """Run the first half to its end, if no second one reads it."""
        async for _ in self.rest:
            pass


@asynccontextmanager
async def halfway(half: Pipeline[In, Frame], source: AsyncGenerator[In, None]) -> AsyncGenerator[Halfway[Frame], None]:
    """Run ``source`` through the first half of a pipeline for the length of a block, up to its first frame."""
    async with half.open(source) as frames:
        yield Halfway(await first(frames), frames)
