"""Watching: the frames of one response at each junction, while it runs, for one reader that may be slow.

The taps are stages of this response alone, so other responses pass none.  They note a frame and its time; the lines of
a recording are made of it later, in a thread.  If the reader is too slow, frames are left out, and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.api.http.wire import server_sent
from penstock.extensions.workbench.live.spelling import Spelling
from penstock.pipeline.core import Pipeline
from penstock.pipeline.recordings.format import End, Failure, line
from penstock.pipeline.recordings.redaction import public
from penstock.pipeline.tasks import in_thread

Frame = TypeVar("Frame")

JUNCTIONS = ("render", "generate", "converse", "emit")
"""The stages whose output is watched: prompts, tokens, items and events."""

MOST_WAITING = 50_000
"""The most frames that wait for a slow reader."""

AT_ONCE = 500
"""Frames that are encoded together."""


@dataclass(eq=False)
class Watch:
    """The frames of one response that wait for their reader; a frame beyond the ``most`` is left out."""

    most: int = MOST_WAITING
    clock: Callable[[], float] = time.monotonic
    waiting: deque[tuple[str, float, Any]] = field(default_factory=deque)
    passed: int = 0
    """Frames that have passed a tap."""
    left_out: int = 0
    failure: Failure | None = None
    has_ended: bool = False

    def __post_init__(self) -> None:
        self._started = self.clock()
        self._has_news = asyncio.Event()

    def install(self, pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        """Return the pipeline with a tap after each stage that is watched; a backend of texts has fewer of them."""
        for stage in JUNCTIONS:
            if stage in pipeline.names():
                pipeline = pipeline.insert_after(stage, f"watch {stage}", WatchTap(self, stage))
        return pipeline

    def note(self, stage: str, frame: Any) -> None:
        """Keep a frame for the reader, if there is room."""
        self.passed += 1
        if len(self.waiting) < self.most:
            self.waiting.append((stage, self.clock() - self._started, frame))
            self._has_news.set()
        else:
            self.left_out += 1

    async def drive(self, events: AsyncGenerator[Any, None], begun: asyncio.Future[None]) -> None:
        """Run the response to its end, however slow its reader is; ``begun`` gets an error before the first event."""
        try:
            async with aclosing(events):
                async for _ in events:
                    if not begun.done():
                        begun.set_result(None)
                    await asyncio.sleep(0)  # an engine may have many tokens at once
        except Exception as error:  # noqa: BLE001 - the reader gets it
            if begun.done():
                self.failure = Failure.of(error)
            else:
                begun.set_exception(error)
        finally:
            self.has_ended = True
            self._has_news.set()

    async def lines(self, spelling: Spelling) -> AsyncGenerator[bytes, None]:
        """Yield the frames as server-sent events, and the end of the response after them."""
        reported = 0
        while self.waiting or not self.has_ended:
            await self._has_news.wait()
            self._has_news.clear()
            while self.waiting:
                batch = [self.waiting.popleft() for _ in range(min(len(self.waiting), AT_ONCE))]
                yield await in_thread(_written, batch, spelling)
            if self.left_out > reported:
                reported = self.left_out
                yield server_sent({"frames": reported}, "left_out")
        yield server_sent(End(self.passed, self.failure), "end")


@dataclass(frozen=True)
class WatchTap:
    """A stage that passes all frames on, and shows them to a watch."""

    watch: Watch
    stage: str

    async def __call__(self, source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
        """Yield the frames of ``source``."""
        note, stage = self.watch.note, self.stage
        async for frame in source:
            note(stage, frame)
            yield frame


def _written(batch: Sequence[tuple[str, float, Any]], spelling: Spelling) -> bytes:
    parts: list[bytes] = []
    for stage, at, frame in batch:
        if texts := spelling.of(getattr(frame, "token_ids", ())):
            parts.append(server_sent(texts, "texts"))
        parts.append(junction_line(stage, line(public(frame), at)))
    return b"".join(parts)


def junction_line(stage: str, written: bytes) -> bytes:
    """Return a line of a recording, with its line break, as a server-sent event that is named for its junction."""
    return b"event: %b\ndata: %b\n" % (stage.encode(), written)
