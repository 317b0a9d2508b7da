"""The body of a request, received within the limits of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from aiohttp import hdrs, web

from penstock.api.http.auth import OWNER
from penstock.api.http.held_bytes import HeldBody, HeldBytes
from penstock.pipeline.errors import BodyTooLarge, InvalidRequest, RequestTimeout, ServerBusy, UnsupportedMediaType
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.tasks import LARGE_BYTES, apart, in_thread

LONG = 2**15
"""Bytes of a body that takes milliseconds to read."""

SECONDS = 120.0
"""Seconds in which a body must arrive."""

REFUSALS = (BodyTooLarge, RequestTimeout, ServerBusy)
"""The errors that every request with a body can get, besides those that requests without one get too."""

Value = TypeVar("Value")
More = ParamSpec("More")

HELD = web.AppKey("held", HeldBytes)
_BODY = web.RequestKey("body", HeldBody)


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
    loop, late = asyncio.get_running_loop(), f"The body did not arrive within {SECONDS:.0f} seconds."
    try:
        async with asyncio.timeout(SECONDS) as deadline:

            def drop() -> None:
                nonlocal late
                late = "The body arrives too slowly while the server has no room for others. Try again in a moment."
                deadline.reschedule(loop.time())

            request[_BODY] = held = request.app[HELD].body(request.client_max_size, drop, request.get(OWNER, ""))
            try:
                async for chunk in request.content.iter_any():
                    if held.size + len(chunk) > held.limit:
                        raise _too_large(request)
                    held.take(len(chunk))
                    chunks.append(chunk)
            finally:
                held.finish()
    except TimeoutError:
        raise RequestTimeout(late) from None
    except web.RequestPayloadError as error:
        raise InvalidRequest("The body cannot be read: it breaks off, or its transfer coding is wrong.") from error
    return await joined(chunks, held.size)


async def joined(chunks: list[bytes], size: int) -> bytes:
    """Return chunks as one, joined in a thread if they are large."""
    return await apart(size > LARGE_BYTES, b"".join, chunks)


async def off_loop(
    read: Callable[Concatenate[bytes, More], Value], body: bytes, /, *more: More.args, **named: More.kwargs
) -> Value:
    """Read a body with a function: a long one in a thread, as the event loop would wait."""
    return read(body, *more, **named) if len(body) <= LONG else await in_thread(read, body, *more, **named)


def release(request: web.Request) -> None:
    """Stop counting the body of the request, which is needed no longer."""
    if _BODY in request:
        request[_BODY].release()


def _too_large(request: web.Request) -> BodyTooLarge:
    return BodyTooLarge(f"The body is over this server's limit of {request.client_max_size} bytes.")
