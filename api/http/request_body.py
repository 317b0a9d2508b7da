"""The body of a request, received within the limits of the server."""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web

from penstock.pipeline.errors import BodyTooLarge, InvalidRequest, RequestTimeout, UnsupportedMediaType
from penstock.pipeline.protocol.params.json_body import shortened

SECONDS = 120.0
"""Seconds in which a body must arrive."""

REFUSALS = (BodyTooLarge, RequestTimeout)
"""The errors that every request with a body can get, besides those that requests without one get too."""


async def receive(request: web.Request) -> bytes:
    """Return the body.

    Raises `UnsupportedMediaType` if it is compressed: a small body could inflate to gigabytes.  Raises `BodyTooLarge`,
    for a declared length before the body is received, `RequestTimeout`, or `InvalidRequest` if it cannot be read.
    """
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaType(f"Send the body without Content-Encoding: {shortened(encoding)} is not supported.")
    too_large = BodyTooLarge(f"The body is over this server's limit of {request.client_max_size} bytes.")
    if request.content_length is not None and request.content_length > request.client_max_size:
        raise too_large
    try:
        async with asyncio.timeout(SECONDS):
            return await request.read()
    except TimeoutError:
        raise RequestTimeout(f"The body did not arrive within {SECONDS:.0f} seconds.") from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"The body cannot be read: {error}") from error
