"""Server-sent events: every stream ends in good order, and no connection is silent for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Self

from aiohttp import HttpVersion11, hdrs, web

from penstock.api.http.conventions import REQUEST_ID, RequestError
from penstock.api.http.errors import ENDED, PROBLEM, STREAMING, answer_to, cause_of
from penstock.api.http.wire import Wire
from penstock.pipeline import metrics
from penstock.pipeline.faults import name_stage
from penstock.services.runs.run import RunReleased

logger = logging.getLogger(__name__)

SSE_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold back 16 KB otherwise
}

LONG_FRAME = 2**16
"""Bytes of an event after which other tasks get a turn of the event loop; a thread would cost more."""


async def send(request: web.Request, events: AsyncIterator[Any], wire: Wire, keep_alive: float) -> web.StreamResponse:
    """Send the rewritten events as they come, and what ends every stream.

    After each ``keep_alive`` seconds of silence, the client gets a sign of life.  If the response moves to another
    server, the connection is closed without an end, and the client can resume after the last event that it received.
    A stream that breaks off has ``ENDED``, and the ``PROBLEM`` if its client gets one.
    """
    answer = web.StreamResponse(headers=SSE_HEADERS | {"Content-Type": wire.content_type})
    request[STREAMING] = True
    if request.version < HttpVersion11:
        answer.force_close()  # without chunked encoding, closing is the only end of a stream
    await answer.prepare(request)
    mode = "stream" if request.method == hdrs.METH_POST else "resume"
    is_open = metrics.STREAMS_OPEN.labels(mode).track_inprogress()
    encode, last = wire.encode, None
    end: bytes | None = wire.end
    with is_open, KeepAliveWriter(answer, keep_alive, wire.keep_alive) as stream:
        try:
            async for event in events:
                await stream.write(encode(event))
                last = event
        except RunReleased:
            answer[ENDED], end = "released", None
        except ConnectionResetError:
            raise
        except Exception as error:  # noqa: BLE001 - the client gets it
            name_stage(error)
            refused = answer_to(request, error)
            answer[PROBLEM], answer[ENDED] = refused[PROBLEM], cause_of(error)
            end = _fault(wire, RequestError(refused.status, refused[PROBLEM], request.get(REQUEST_ID, ""), last))
        if end is None:
            if request.transport is not None:
                request.transport.close()
            return answer
        if end:
            await stream.write(end)
    await answer.write_eof()
    return answer


def _fault(wire: Wire, error: RequestError) -> bytes | None:
    """Return the last frame of a stream that breaks off; None if its form has none, or cannot write it."""
    try:
        return wire.fault(error) if wire.fault else None
    except Exception:
        logger.exception("A dialect met a bug in its fault")
        return None


class KeepAliveWriter:
    """A writer to ``stream`` that, within its block, sends a ``sign`` of life after ``period`` seconds of silence."""

    __slots__ = ("_commenting", "_loop", "_period", "_sign", "_stream", "_timer", "_written_at")

    def __init__(self, stream: web.StreamResponse, period: float, sign: bytes) -> None:
        self._stream = stream
        self._sign = sign
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
        if len(data) >= LONG_FRAME:  # it took a while to encode, and so may the next
            await asyncio.sleep(0)

    def _check_silence(self) -> None:
        """Send a comment if the silence is long enough, unless the last comment is still on its way."""
        remaining = self._written_at + self._period - self._loop.time()
        if remaining <= 0 and (self._commenting is None or self._commenting.done()):
            self._commenting = self._loop.create_task(self._comment())
        self._timer = self._loop.call_later(remaining if remaining > 0 else self._period, self._check_silence)

    async def _comment(self) -> None:
        with suppress(ConnectionResetError):  # the next event meets the same error
            await self.write(self._sign)
