"""A tap keeps the frames that pass a place in a pipeline, for tests of stages and for traces."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

Frame = TypeVar("Frame")


@dataclass
class Tap:
    """A stage that passes all frames on unchanged and keeps them in ``frames``.

    Insert it with ``pipeline.insert_after("parse", "tap", tap)``.  ``raised`` is the exception that came instead of
    more frames.  ``abandoned`` is True if its reader left before the end.
    """

    frames: list[Any] = field(default_factory=list)
    raised: Exception | None = None
    abandoned: bool = False

    async def __call__(self, source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
        """Yield the frames of ``source``."""
        try:
            async for frame in source:
                self.keep(frame)
                yield frame
        except Exception as error:
            self.raised = error
            raise
        except BaseException:  # cancelled, or closed by its reader
            self.abandoned = True
            raise

    def keep(self, frame: Any) -> None:
        """Keep a frame that passes."""
        self.frames.append(frame)
