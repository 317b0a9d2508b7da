"""Several streams at once, read as one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

from penstock.pipeline.tasks import cancelled
from penstock.pipeline.yield_point import YieldPoint

AHEAD = 16
"""The most values of all streams together that wait for their reader, once it has begun."""

BEGUN_AT_ONCE = 8
"""The most streams that begin in one turn of the event loop."""

Strand: TypeAlias = Callable[[], AsyncGenerator[Any, None]]
"""A function that opens a stream."""


@asynccontextmanager
async def woven(strands: Sequence[Strand]) -> AsyncGenerator[AsyncIterator[tuple[int, Any]], None]:
    """Read streams for the length of a block, each in a task of its own.

    The block begins once all have a first value.  These values come in the order of their streams, and the others as
    they are ready, each with the position of its stream.  The first error of a stream is raised, and ends the others.
    """
    ready = _Ready()
    loop = asyncio.get_running_loop()
    begun: list[asyncio.Future[Any]] = [loop.create_future() for _ in strands]
    tasks = list[asyncio.Task[None]]()
    try:
        for position, strand in enumerate(strands):
            tasks.append(asyncio.create_task(_read(position, strand, begun[position], ready)))
            if len(tasks) % BEGUN_AT_ONCE == 0:
                await asyncio.sleep(0)
        first = await asyncio.gather(*begun)
        ready.is_read = True
        async with aclosing(_values(first, ready)) as values:
            yield values
    finally:
        await cancelled(tasks)
        await asyncio.gather(*begun, return_exceptions=True)


_END = object()
"""The value after the last one of a stream."""


Entry: TypeAlias = tuple[int, Any, Exception | None]
"""The position of a stream with its next value, its end or its error."""


class _Ready:
    """The values that wait for their reader.

    Until it has begun, any number waits: a stream may have to end before another can begin.
    """

    def __init__(self) -> None:
        self._early: deque[Entry] = deque()
        self._queue: asyncio.Queue[Entry] = asyncio.Queue(AHEAD)
        self.is_read = False

    async def put(self, entry: Entry) -> None:
        if self.is_read:
            await self._queue.put(entry)
        else:
            self._early.append(entry)
            await asyncio.sleep(0)

    async def get(self) -> Entry:
        return self._early.popleft() if self._early else await self._queue.get()


async def _read(position: int, strand: Strand, begun: asyncio.Future[Any], ready: _Ready) -> None:
    """Read one stream: its first value, or an error before that, becomes the result of ``begun``."""
    try:
        async with aclosing(strand()) as values:
            begun.set_result(await anext(values, _END))
            async for value in values:
                await ready.put((position, value, None))
    except Exception as error:  # noqa: BLE001 - its reader gets it
        if begun.done():
            await ready.put((position, _END, error))
        else:
            begun.set_exception(error)
    else:
        await ready.put((position, _END, None))
    finally:
        begun.cancel()  # for a stream that was cancelled before its first value


async def _values(first: Sequence[Any], ready: _Ready) -> AsyncGenerator[tuple[int, Any], None]:
    for position, value in enumerate(first):
        if value is not _END:
            yield position, value
    running, rest = len(first), YieldPoint()
    while running:
        await rest()  # many values may wait
        position, value, error = await ready.get()
        if error is not None:
            raise error
        if value is _END:
            running -= 1
        else:
            yield position, value
