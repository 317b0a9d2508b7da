"""Events on their way out: a stream that always ends, and a connection that is never silent for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

from aiohttp import web

from pipeline.ending import Follower
from pipeline.protocol.events import KEEP_ALIVE, ResponseEvent

logger = logging.getLogger(__name__)

SSE_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold back 16 KB otherwise
}

Write: TypeAlias = Callable[[bytes], Awaitable[None]]


async def whole(events: AsyncIterator[ResponseEvent]) -> AsyncGenerator[ResponseEvent, None]:
    """``events``, ended in good order even if a stage behind ``emit`` breaks."""
    stream = Follower()
    try:
        async for event in events:
            stream.feed(event)
            yield event
            if stream.ended:
                return
    except Exception as error:
        if stream.response is None:
            raise
        logger.exception("Response %s met a bug behind emit", stream.response.id)
        for event in stream.fail(error):
            yield event


@asynccontextmanager
async def kept_alive(stream: web.StreamResponse, period: float) -> AsyncGenerator[Write, None]:
    """A way to write to ``stream`` that also writes a comment after each ``period`` of silence, in seconds."""
    loop = asyncio.get_running_loop()
    written_at = loop.time()

    async def write(data: bytes) -> None:
        nonlocal written_at
        written_at = loop.time()
        await stream.write(data)

    async def break_silence() -> None:
        while True:
            silence = loop.time() - written_at
            if silence >= period:
                await write(KEEP_ALIVE)
            await asyncio.sleep(period - silence if silence < period else period)

    breaking = asyncio.create_task(break_silence())
    try:
        yield write
    finally:
        breaking.cancel()
