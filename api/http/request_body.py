"""The body of a request, received within the limits of the server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import hdrs, web

from penstock.api.http.errors import Handler
from penstock.pipeline.errors import BodyTooLarge, InvalidRequest, RequestTimeout, ServerBusy, UnsupportedMediaType
from penstock.pipeline.protocol.params.json_body import shortened

SECONDS = 120.0
"""Seconds in which a body must arrive."""

MOST_AT_ONCE = 4
"""Bodies of the largest size that are held at once: while they are received, read and rendered."""

SMALL = 2**20
"""Bytes of a body that is received however many bytes are held already."""

REFUSALS = (BodyTooLarge, RequestTimeout, ServerBusy)
"""The errors that every request with a body can get, besides those that requests without one get too."""


@dataclass
class HeldBytes:
    """The bytes of all bodies that this server holds."""

    count: int = 0

    def take(self, count: int, size: int, limit: int) -> None:
        """Count more bytes, of a body that has ``size`` with them; ``limit`` is that of one body.

        Raises `ServerBusy`, and does not count them, if the server would hold too many.
        """
        if size > SMALL and self.count + count > MOST_AT_ONCE * limit:
            raise ServerBusy("Other requests with large bodies are being read. Try again in a moment.")
        self.count += count

    def give(self, count: int) -> None:
        """Stop counting bytes that are needed no longer."""
        self.count -= count


HELD = web.AppKey("held", HeldBytes)
_SIZE = web.RequestKey("size", int)


async def receive(request: web.Request) -> bytes:
    """Return the body, which counts as held until the request is answered, or until `release` is called.

    Raises `UnsupportedMediaType` if it is compressed: a small body could inflate to gigabytes.  Raises `BodyTooLarge`,
    for a declared length before the body is received, `ServerBusy`, `RequestTimeout`, or `InvalidRequest` if it cannot
    be read.
    """
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaType(f"Send the body without Content-Encoding: {shortened(encoding)} is not supported.")
    if request.content_length is not None and request.content_length > request.client_max_size:
        raise _too_large(request)
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(SECONDS):
            async for chunk in request.content.iter_any():
                _hold(request, len(chunk))
                chunks.append(chunk)
    except TimeoutError:
        raise RequestTimeout(f"The body did not arrive within {SECONDS:.0f} seconds.") from None
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"The body cannot be read: {error}") from error
    return b"".join(chunks)


def _hold(request: web.Request, count: int) -> None:
    """Count bytes that have arrived: a length that is only declared costs a client nothing."""
    size = request.get(_SIZE, 0) + count
    if size > request.client_max_size:
        raise _too_large(request)
    request.app[HELD].take(count, size, request.client_max_size)
    request[_SIZE] = size


def release(request: web.Request) -> None:
    """Stop counting the body of the request, which is needed no longer."""
    request.app[HELD].give(request.get(_SIZE, 0))
    request[_SIZE] = 0


@web.middleware
async def release_bodies(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Release the body of each request that has been answered."""
    try:
        return await handler(request)
    finally:
        release(request)


def _too_large(request: web.Request) -> BodyTooLarge:
    return BodyTooLarge(f"The body is over this server's limit of {request.client_max_size} bytes.")
