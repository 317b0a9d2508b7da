"""Events on their way out: a stream that always ends, and a connection that is never silent for long."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import msgspec
from aiohttp import HttpVersion11, web

from api.errors import STREAMING
from api.log import ANSWERED
from pipeline.protocol.events import DONE, KEEP_ALIVE, Event, TerminalEvent, to_sse
from stages.persist.live import RunMoved

logger = logging.getLogger(__name__)

SSE_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold back 16 KB otherwise
}

BLOCK = 16
"""With obfuscation, the text of a delta and what is added to it are a multiple of so many bytes."""

LARGE = 2**16
"""Bytes of an event behind which others get a turn of the loop."""

Write: TypeAlias = Callable[[bytes], Awaitable[None]]

_encode = msgspec.json.Encoder().encode


def obfuscated(event: Event) -> bytes:
    """`to_sse`, with random characters beside a delta, so that nobody reads its length from that of a packet.

    Logprobs, where they are asked for, tell it all the same.
    """
    data, delta = to_sse(event), getattr(event, "delta", None)
    if not isinstance(delta, str):
        return data
    missing = -len(_encode(delta)[1:-1]) % BLOCK
    return b'%b,"obfuscation":"%b"}\n\n' % (data[:-3], secrets.token_urlsafe(missing)[:missing].encode())


async def send(
    request: web.Request,
    ready: Iterable[Any],
    rest: AsyncIterator[Any],
    encode: Callable[[Any], bytes],
    keep_alive: float,
) -> web.StreamResponse:
    """Send the events that are ``ready`` and the ``rest``, which is still to come, and what ends every stream.

    After each ``keep_alive`` seconds of silence there is a comment.  Where the stream goes on elsewhere, the connection
    breaks: whoever reads it asks again, for the events behind the last one.
    """
    answer = web.StreamResponse(headers=SSE_HEADERS)
    request[STREAMING] = True
    if request.version < HttpVersion11:
        answer.force_close()  # without chunks, only the end of the connection tells the end of the stream
    await answer.prepare(request)
    event: Any = None
    async with kept_alive(answer, keep_alive) as write:
        for event in ready:
            await write(encode(event))
        try:
            async for event in rest:
                await write(encode(event))
        except RunMoved:
            if request.transport is not None:
                request.transport.close()
            return answer
        await write(DONE)
    await answer.write_eof()
    if isinstance(event, TerminalEvent) and request.method == "POST":  # told of where it was made, and only there
        request[ANSWERED] = event.response
    return answer


@asynccontextmanager
async def kept_alive(stream: web.StreamResponse, period: float) -> AsyncGenerator[Write, None]:
    """A way to write to ``stream`` that also writes a comment after each ``period`` of silence, in seconds."""
    loop = asyncio.get_running_loop()
    written_at = loop.time()

    async def write(data: bytes) -> None:
        nonlocal written_at
        written_at = loop.time()
        await stream.write(data)
        if len(data) >= LARGE:  # it took a while to encode, and so may the next
            await asyncio.sleep(0)

    async def break_silence() -> None:
        with suppress(ConnectionResetError):  # whoever writes the next event meets it too
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
