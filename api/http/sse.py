"""Server-sent events: every stream ends in good order, and no connection is silent for long.

A request may wait long for its first event: for a place at the engine, or until a model is loaded.  Its headers go out
with the first sign of life then, and an error after that is the last frame of the stream in place of a status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, MutableMapping
from contextlib import suppress
from typing import Any, Self
from weakref import WeakKeyDictionary

from aiohttp import HttpVersion11, hdrs, web

from penstock.api.http.conventions import REQUEST_ID, RequestError
from penstock.api.http.errors import ENDED, PROBLEM, REFUSED, STREAMING, Handler, answer_to, cause_of
from penstock.api.http.wire import Wire
from penstock.pipeline import metrics
from penstock.pipeline.faults import name_stage
from penstock.pipeline.hot_path import join
from penstock.pipeline.tasks import until_it_waits
from penstock.services.runs.run import RunReleased

logger = logging.getLogger(__name__)

SSE_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold back 16 KB otherwise
}

LOOKS = 8
"""Looks at the open streams in the time for which one may be silent."""

LONG_FRAME = 2**16
"""Bytes of an event after which other tasks get a turn of the event loop; a thread would cost more."""


async def send(request: web.Request, events: AsyncIterator[Any], wire: Wire, keep_alive: float) -> web.StreamResponse:
    """Send the rewritten events as they come, and what ends every stream.

    The client gets a sign of life before each silence of ``keep_alive`` seconds.  If the response moves to another
    server, the connection is closed without an end, and the client can resume after the last event that it received.
    A stream that breaks off has ``ENDED``, and the ``PROBLEM`` if its client gets one.  One that has waited, as
    `await_events` says, goes on here.
    """
    waiting: EventStream | None = request.pop(_WAITING, None)
    stream = waiting or EventStream(request, wire, keep_alive)
    stream.wire = wire
    mode = "stream" if request.method == hdrs.METH_POST else "resume"
    is_open = metrics.STREAMS_OPEN.labels(mode).track_inprogress()
    encode = wire.encode
    with is_open, stream:
        await stream.begin()
        join(outlet=stream)
        try:
            async for event in events:
                await stream.write(encode(event))
                stream.last = event
        except RunReleased:
            stream.answer[ENDED] = "released"
            return await stream.end(None)
        except ConnectionResetError:
            raise
        except Exception as error:  # noqa: BLE001 - the client gets it
            return await stream.break_off(error)
        return await stream.end(wire.end)


def await_events(request: web.Request, wire: Wire, keep_alive: float) -> None:
    """Give the client of a request signs of life from now on: a stream will answer it, which `send` takes over."""
    if _WAITING not in request:
        request[_WAITING] = EventStream(request, wire, keep_alive)
        request[_WAITING].start()


@web.middleware
async def break_off_begun(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Write an error before the first event into the stream, if its client has got a sign of life already."""
    try:
        return await handler(request)
    except ConnectionResetError:
        raise
    except Exception as error:
        stream: EventStream | None = request.get(_WAITING)
        if stream is None:
            raise
        stream.stop()
        if not stream.answer.prepared:
            raise
        return await stream.break_off(error)
    finally:
        if _WAITING in request:
            request.pop(_WAITING).stop()


class _Answer(web.StreamResponse):
    """An answer whose headers go out with the first bytes of its body."""

    _send_headers_immediately = False


class _Silence:
    """Looks for streams that are about to be silent for ``period`` seconds: a timer for each would take 700 bytes."""

    def __init__(self, period: float) -> None:
        self._between = period / LOOKS
        self._longest = period - self._between
        self._streams: set[EventStream] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: EventStream) -> None:
        """Look at a stream from now on."""
        self._streams.add(stream)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._between, self._look)

    def discard(self, stream: EventStream) -> None:
        """Look at a stream no longer."""
        self._streams.discard(stream)

    def _look(self) -> None:
        for stream in self._streams:
            stream.end_silence(self._longest)
        self._timer = asyncio.get_running_loop().call_later(self._between, self._look) if self._streams else None


_silences: MutableMapping[asyncio.AbstractEventLoop, dict[float, _Silence]] = WeakKeyDictionary()
"""One for all streams of an event loop that have the same period."""


def _silence(period: float) -> _Silence:
    of_loop = _silences.setdefault(asyncio.get_running_loop(), {})
    return of_loop.get(period) or of_loop.setdefault(period, _Silence(period))


class EventStream:
    """A stream that, within its block, sends a sign of life before it is silent for ``period`` seconds.

    It is the outlet of the response's hot path, if that has one.

    Its headers go out with the first sign, if `begin` has not sent them by then.  What is written in one turn of the
    event loop goes out together, as each packet costs more than most events do.
    """

    __slots__ = (
        "_commenting",
        "_held",
        "_is_chunked",
        "_loop",
        "_request",
        "_silence",
        "_written_at",
        "answer",
        "last",
        "wire",
    )

    def __init__(self, request: web.Request, wire: Wire, period: float) -> None:
        self.wire = wire
        self.last: Any = None  # the last event
        self.answer = _Answer(headers=SSE_HEADERS)
        self._request = request
        self._silence = _silence(period)
        self._held: bytearray | None = None  # written in this turn of the loop; None if nothing is
        self._loop = asyncio.get_running_loop()
        self._is_chunked = False
        self._written_at = self._loop.time()
        self._commenting: asyncio.Task[None] | None = None  # one task per comment; one per stream would cost more

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Send signs of life from now on."""
        self._silence.add(self)

    def __exit__(self, *_: object) -> None:
        self._flush()  # an error may close the connection in this turn
        self.stop()

    def stop(self) -> None:
        """Send no more signs of life."""
        self._silence.discard(self)
        if self._commenting is not None:
            self._commenting.cancel()

    async def begin(self) -> None:
        """Send the headers, unless a sign of life has."""
        if self._commenting is not None:
            await asyncio.wait((self._commenting,))  # it may be in the middle of the headers
        await self._begin()

    async def write(self, data: bytes) -> None:
        """Write to the stream, waiting if the client reads slowly."""
        self._written_at = self._loop.time()
        is_long = self._hold(data) >= LONG_FRAME
        if is_long or not self.is_ready:
            await self.answer.write(self._taken())
        if is_long:  # it took a while to encode, and so may the next
            await asyncio.sleep(0)

    @property
    def is_ready(self) -> bool:
        """True if the client is there and reads."""
        protocol = self._request.protocol
        transport = protocol.transport
        return transport is not None and not protocol.writing_paused and not transport.is_closing()

    def put(self, event: Any) -> None:
        """Write an event as `write_at_once` does."""
        self.write_at_once(self.wire.encode(event))
        self.last = event

    def write_at_once(self, data: bytes) -> None:
        """Write to a stream that has begun and `is_ready`.

        The writer of aiohttp takes ten times as long.
        """
        self._written_at = self._loop.time()
        self._flush()
        transport = self._request.protocol.transport
        if data and transport is not None:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def end_silence(self, longest: float) -> None:
        """Send a comment if nothing was written for ``longest`` seconds, unless the last one is still on its way."""
        is_silent = self._loop.time() - self._written_at >= longest
        if is_silent and (self._commenting is None or self._commenting.done()):
            self._commenting = self._loop.create_task(self._comment())

    async def break_off(self, error: Exception) -> web.StreamResponse:
        """End the stream with an error after its last event."""
        name_stage(error)
        request, answer = self._request, self.answer
        await self.begin()
        refused = answer_to(request, error)
        answer[PROBLEM], answer[REFUSED], answer[ENDED] = refused[PROBLEM], refused.status, cause_of(error)
        failure = RequestError(refused.status, refused[PROBLEM], request.get(REQUEST_ID, ""), self.last)
        return await self.end(_fault(self.wire, failure))

    async def end(self, last: bytes | None) -> web.StreamResponse:
        """End the stream with a ``last`` frame; None closes the connection without an end."""
        if last is None:
            self._flush()
            if self._request.transport is not None:
                self._request.transport.close()
            return self.answer
        await self.answer.write_eof(self._taken() + last)
        return self.answer

    def _hold(self, data: bytes = b"") -> int:
        """Hold what is written until the loop turns; return how many bytes are held."""
        if self._held is None:
            self._held = bytearray()
            self._loop.call_soon(self._flush)
        self._held += data
        return len(self._held)

    def _taken(self) -> bytes:
        """Return what was held."""
        held, self._held = self._held, None
        return bytes(held or b"")

    def _flush(self) -> None:
        """Write what was held, and the headers before it, without waiting."""
        if self._held is not None:
            with suppress(ConnectionResetError):  # the next event meets the same error
                until_it_waits(self.answer.write(self._taken()))  # if the client reads slowly, the next writer waits

    async def _begin(self) -> None:
        request, answer = self._request, self.answer
        if answer.prepared:
            return
        request[STREAMING] = True
        request.protocol.keep_alive(True)  # its timer for idle connections would take 600 bytes for the whole stream
        if request.version < HttpVersion11:
            answer.force_close()  # without chunked encoding, closing is the only end of a stream
        answer.headers["Content-Type"] = self.wire.content_type
        await answer.prepare(request)
        self._is_chunked = "chunked" in answer.headers.get(hdrs.TRANSFER_ENCODING, "")
        self._hold()

    async def _comment(self) -> None:
        with suppress(ConnectionResetError):  # the next event meets the same error
            await self._begin()
            await self.write(self.wire.keep_alive)


_WAITING: web.RequestKey[EventStream] = web.RequestKey("waiting", EventStream)
"""The stream that will answer a request, until `send` takes it."""


def _fault(wire: Wire, error: RequestError) -> bytes | None:
    """Return the last frame of a stream that breaks off; None if its form has none, or cannot write it."""
    try:
        return wire.fault(error) if wire.fault else None
    except Exception:
        logger.exception("A dialect met a bug in its fault")
        return None
