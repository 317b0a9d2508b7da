"""Put one stage at two places: log when the first frame came there, and the last.

The line of `generate`, one for each turn, has the time of the engine; that of `emit` has the time of all stages.
The type variable says that the stage passes frames of any kind on, so it fits everywhere. The state of a response is
local to a call, so both places and all responses are independent.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from penstock.pipeline.core import Pipeline

Frame = TypeVar("Frame")


@dataclass(frozen=True)
class LogTimes:
    place: str

    async def __call__(self, source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
        begun, first, count = monotonic(), 0.0, 0
        try:
            async for frame in source:
                first = first or monotonic() - begun
                count += 1
                yield frame
        finally:
            last = monotonic() - begun
            logging.getLogger(__name__).info("%s: %d frames, %.3f to %.3f s", self.place, count, first, last)


def install(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    for place in ("generate", "emit"):
        pipeline = pipeline.insert_after(place, f"time_{place}", LogTimes(place))
    return pipeline
