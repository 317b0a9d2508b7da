"""Persist: the last stage, which passes every event on unchanged after appending it to the log of its run.

Only the first and the terminal event wait for the store, and only briefly.  A client that has seen the id of a response
can retrieve it, even if this server is killed.  A client that has seen its end can retrieve that.  However the stage is
left, the run has ended, both in its log and in the store.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from penstock.pipeline.faults import first
from penstock.pipeline.frames import EmittedFrame, ItemResult, ItemTokens, ResponseStarted
from penstock.pipeline.hot_path import join, on_the_way
from penstock.pipeline.lifecycle.rules import InvariantBroken
from penstock.pipeline.protocol import events
from penstock.pipeline.protocol.events import DELTAS, ResponseEvent
from penstock.services.runs.run import RunRegistry


@on_the_way
@dataclass(frozen=True)
class Persist:
    """Log each response in ``runs``, which also stores it if the request wants that."""

    runs: RunRegistry

    async def __call__(self, source: AsyncIterator[EmittedFrame]) -> AsyncGenerator[ResponseEvent, None]:
        """Pass the events on and keep the rest.  Raises `InvariantBroken` if the stream has no terminal event."""
        run = self.runs.begin(await _first(source))
        try:
            await run.committed()
            join(log=run)
            async for frame in source:
                delta: Any = frame
                if type(delta) in DELTAS and run.append(delta):  # hot path: see `penstock.pipeline.core`
                    yield delta
                    continue
                if run.ended:  # ended from outside, e.g. cancelled: readers get the end from its log
                    return
                match frame:
                    case events.ResponseCompleted() | events.ResponseIncomplete() | events.ResponseFailed():
                        await run.end(frame)
                        yield frame
                    case ItemTokens() | ItemResult():
                        run.keep(frame)
                    case ResponseStarted():
                        pass
                    case _:
                        run.append(frame)
                        yield frame
        except Exception as error:
            run.fail(error)
            raise
        except BaseException:  # cancelled, or closed by its reader
            run.cancel()
            raise
        if not run.ended:
            violation = InvariantBroken("a stream ends with a terminal event: a stage has lost it")
            run.fail(violation)
            raise violation


async def _first(source: AsyncIterator[EmittedFrame]) -> ResponseStarted:
    frame = await first(source)
    if not isinstance(frame, ResponseStarted):
        raise TypeError("what a response begins with has been lost")
    return frame
