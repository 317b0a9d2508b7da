"""The turns of queued responses: a pipeline that is open waits here before it asks its engine.

So its stages have seen the request once when the client reads ``queued``, and the errors of the prompt are known.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from penstock.pipeline.frames import Prompt

Frame = TypeVar("Frame")


class Turn:
    """The turn of a queued response, for which its pipeline waits."""

    def __init__(self) -> None:
        self.awaited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the pipeline waits; the error that keeps it from that is raised here."""
        self._has_come = asyncio.Event()
        self.came_at = 0.0

    def come(self) -> None:
        """Let the pipeline go on."""
        self.came_at = monotonic()
        self._has_come.set()

    async def wait(self) -> None:
        """Wait until the turn has come."""
        if not self.awaited.done():
            self.awaited.set_result(None)
        await self._has_come.wait()


own: ContextVar[Turn | None] = ContextVar("own", default=None)
"""The turn of the response that this task runs, if that has to wait for it."""


async def own_turn() -> None:
    """Wait until it is the turn of the response that this task runs, if it is queued."""
    if (turn := own.get()) is not None:
        await turn.wait()


def turn_came_at() -> float:
    """Return when the turn of the response that this task runs came, by the monotonic clock; 0 if it had none."""
    turn = own.get()
    return turn.came_at if turn else 0.0


@dataclass(frozen=True)
class HoldPrompts:
    """A stage in front of the engine: a queued response waits here, once ``check`` has found no error in its prompt."""

    check: Callable[[Prompt], Awaitable[object]]

    async def __call__(self, source: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """Yield the frames when their turn has come."""
        async for frame in source:
            if isinstance(frame, Prompt):
                await self.check(frame)
            await own_turn()
            yield frame


async def hold_first(source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
    """Yield the frames, the first one when its turn has come: a stage before the one that begins responses."""
    async for frame in source:
        await own_turn()
        yield frame
        break
    async for frame in source:
        yield frame
