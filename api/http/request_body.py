"""The body of a request, received within the limits of the server."""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web

from penstock.pipeline.errors import BodyTooLarge, InvalidRequest, RequestTimeout, UnsupportedMediaType
from penstock.pipeline.protocol.params.json_body import shortened

SECONDS = 120.0
"""Seconds in which a body must arrive."""


async def receive(request: web.Request) -> bytes:
    """Return the body.

    Raises `UnsupportedMediaType` if it is compressed: a small body could inflate to gigabytes.  Raises `BodyTooLarge`,
    for a declared length before the body is received, `RequestTimeout`, or `InvalidRequest` if it cannot be read.
    """
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaType(f"Send the body without Content-Encoding: {shortened(encoding)} is not supported.")
    most = request.client_max_size
    if request.content_length is not None and request.content_length > most:
        raise BodyTooLarge(f"The body is over this server's limit of {most} bytes.")
    try:
        async with asyncio.timeout(SECONDS):
            return await request.read()
    except TimeoutError:
        raise RequestTimeout(f"The body did not arrive within {SECONDS:.0f} seconds.") from None
    except web.HTTPRequestEntityTooLarge:
        raise BodyTooLarge(f"The body is over this server's limit of {most} bytes.") from None
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"The body cannot be read: {error}") from error
