"""Work on many things at once, whose results come in their order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TypeVar

from penstock.pipeline.tasks import cancelled

Thing = TypeVar("Thing")
Result = TypeVar("Result")


async def in_order(
    things: Iterable[Thing], work: Callable[[Thing], Awaitable[Result]], at_once: int
) -> AsyncGenerator[Result, None]:
    """Yield the result of the work on each thing, in order; at most ``at_once`` are begun and not yet yielded.

    Raises the first error of the work; what still runs then ends.
    """
    running: deque[asyncio.Future[Result]] = deque()
    waiting = iter(things)
    try:
        for thing in waiting:
            running.append(asyncio.ensure_future(work(thing)))
            if len(running) == at_once:
                yield await running.popleft()
        while running:
            yield await running.popleft()
    finally:
        await cancelled(running)
