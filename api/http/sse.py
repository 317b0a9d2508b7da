"""Server-sent events: every stream ends in good order, and no connection is silent for long."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Any, Self

import msgspec
from aiohttp import HttpVersion11, hdrs, web

from penstock.api.http.access_log import RESPONSE, STARTED
from penstock.api.http.beginning import Beginning
from penstock.api.http.errors import STREAMING
from penstock.pipeline import metrics
from penstock.pipeline.protocol.events import DONE, KEEP_ALIVE, Event, TerminalEvent, to_sse
from penstock.stages.services.runs.run import RunReleased

logger = logging.getLogger(__name__)

SSE_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold back 16 KB otherwise
}

BLOCK = 16
"""Bytes: the length of an obfuscated delta and its padding together is a multiple of this."""

LARGE = 2**16
"""Bytes of an event after which other tasks get a turn of the event loop."""

_encode = msgspec.json.Encoder().encode


def obfuscated(event: Event) -> bytes:
    """Encode an event as `to_sse` does, with random padding beside a delta to hide its length in network packets.

    This is OpenAI's ``include_obfuscation``.  Log probabilities, if requested, reveal the length all the same.
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
    """Send the events that are ``ready``, the ``rest`` as they come, and the frame that ends every stream.

    A comment is sent after each ``keep_alive`` seconds of silence.  If the response moves to another server, the
    connection is closed without an end, and the client can resume after the last event that it received.
    """
    answer = web.StreamResponse(headers=SSE_HEADERS)
    request[STREAMING] = True
    if request.version < HttpVersion11:
        answer.force_close()  # without chunked encoding, closing is the only end of a stream
    await answer.prepare(request)
    event: Any = None
    is_new = request.method == hdrs.METH_POST
    is_open = metrics.STREAMS_OPEN.labels("stream" if is_new else "resume").track_inprogress()
    with is_open, KeepAliveWriter(answer, keep_alive) as stream:
        beginning = Beginning(request[STARTED])
        for event in ready:
            await stream.write(encode(event))
            beginning.is_over(event)
        try:
            if is_new:
                async for event in rest:
                    await stream.write(encode(event))
                    if beginning.is_over(event):
                        break
            async for event in rest:
                await stream.write(encode(event))
        except RunReleased:
            if request.transport is not None:
                request.transport.close()
            return answer
        await stream.write(DONE)
    await answer.write_eof()
    if isinstance(event, TerminalEvent) and is_new:  # logged once, with the request that made it
        request[RESPONSE] = event.response
    return answer


class KeepAliveWriter:
    """A writer to ``stream`` that, within its block, sends a comment after each ``period`` seconds of silence."""

    __slots__ = ("_commenting", "_loop", "_period", "_stream", "_timer", "_written_at")

    def __init__(self, stream: web.StreamResponse, period: float) -> None:
        self._stream = stream
        self._period = period
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()
        self._commenting: asyncio.Task[None] | None = None  # one task per comment; one per stream would cost more

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._period, self._check_silence)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._commenting is not None:
            self._commenting.cancel()

    async def write(self, data: bytes) -> None:
        """Write to the stream, waiting if the client reads slowly."""
        self._written_at = self._loop.time()
        await self._stream.write(data)
        if len(data) >= LARGE:  # it took a while to encode, and so may the next
            await asyncio.sleep(0)

    def _check_silence(self) -> None:
        """Send a comment if the silence is long enough, unless the last comment is still on its way."""
        remaining = self._written_at + self._period - self._loop.time()
        if remaining <= 0 and (self._commenting is None or self._commenting.done()):
            self._commenting = self._loop.create_task(self._comment())
        self._timer = self._loop.call_later(remaining if remaining > 0 else self._period, self._check_silence)

    async def _comment(self) -> None:
        with suppress(ConnectionResetError):  # the next event meets the same error
            await self.write(KEEP_ALIVE)
