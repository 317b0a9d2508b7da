"""Several streams at once, read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

AHEAD = 16
"""The most values that all streams together are ahead of their reader."""

Strand: TypeAlias = Callable[[], AsyncGenerator[Any, None]]
"""A function that opens a stream, whose first value says that it has begun."""


@asynccontextmanager
async def woven(strands: Sequence[Strand]) -> AsyncGenerator[AsyncIterator[tuple[int, Any]], None]:
    """Read streams for the length of a block, each in a task of its own.

    Once all have begun, the values that follow come as they are ready, each with the position of its stream.  The first
    error of a stream is raised, and ends the others.
    """
    ready: asyncio.Queue[tuple[int, Any, BaseException | None]] = asyncio.Queue(AHEAD)
    loop = asyncio.get_running_loop()
    begun: list[asyncio.Future[None]] = [loop.create_future() for _ in strands]
    tasks = [
        asyncio.create_task(_read(position, strand, begun[position], ready)) for position, strand in enumerate(strands)
    ]
    try:
        await asyncio.gather(*begun)
        async with aclosing(_values(ready, len(strands))) as values:
            yield values
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *begun, return_exceptions=True)


_END = object()


async def _read(position: int, strand: Strand, begun: asyncio.Future[None], ready: asyncio.Queue[Any]) -> None:
    """Read one stream; its error is raised where it is awaited that it begins, or else comes as its last value."""
    try:
        async with aclosing(strand()) as values:
            await anext(values)
            begun.set_result(None)
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
        begun.cancel()


async def _values(
    ready: asyncio.Queue[tuple[int, Any, BaseException | None]], running: int
) -> AsyncGenerator[tuple[int, Any], None]:
    while running:
        position, value, error = await ready.get()
        if error is not None:
            raise error
        if value is _END:
            running -= 1
        else:
            yield position, value
