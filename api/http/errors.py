"""Errors over HTTP: a failure before the first header becomes an HTTP status with OpenAI's error body."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec
from aiohttp import web

from penstock.api.http.bodies import ErrorBody, Problem
from penstock.pipeline.errors import (
    BodyTooLarge,
    ConversationLocked,
    EngineOverloaded,
    InvalidRequest,
    ServerStopping,
    ServerUnreachable,
    StageError,
    StoreFailed,
    Unauthorized,
)

logger = logging.getLogger(__name__)

STREAMING: web.RequestKey[bool] = web.RequestKey("streaming", bool)
"""Set on a request just before the headers of its stream go out."""

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PASSING = (ConversationLocked, EngineOverloaded, ServerStopping, ServerUnreachable, StoreFailed)
"""Errors that may be over when the client retries; their answers have a ``Retry-After`` header."""

_encode = msgspec.json.Encoder().encode


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error with OpenAI's error body; after the headers of a stream, close the connection instead."""
    try:
        return await handler(request)
    except ConnectionResetError:
        logger.debug("A client left in the middle of its stream")
        raise asyncio.CancelledError from None  # what aiohttp raises when it notices first; it logs others as bugs
    except Exception as error:
        if request.get(STREAMING):
            raise
        return _answer(request, error)


def _answer(request: web.Request, error: Exception) -> web.Response:
    match error:
        case StageError():
            return refusal(error)
        case web.HTTPRequestEntityTooLarge():
            return refusal(BodyTooLarge(f"The body is over this server's limit of {request.client_max_size} bytes."))
        case web.RequestPayloadError():
            return refusal(InvalidRequest(f"The body cannot be read: {error}"))
        case web.HTTPException():
            answer = _error_body(error.status, error.reason, "invalid_request_error", None, None)
            if "Allow" in error.headers:
                answer.headers["Allow"] = error.headers["Allow"]
            return answer
        case _:
            logger.error("%s %s met a bug", request.method, request.path, exc_info=error)
            return _error_body(500, "Internal error. The server's log has more.", "server_error", None, "server_error")


def refusal(error: StageError) -> web.Response:
    """Return the answer to a request that failed with ``error`` before any header went out."""
    answer = _error_body(error.status, error.message, error.type, error.param, error.code)
    if isinstance(error, _PASSING):
        answer.headers["Retry-After"] = "1"
    elif isinstance(error, Unauthorized):
        answer.headers["WWW-Authenticate"] = "Bearer"
    if not isinstance(error, InvalidRequest):
        logger.warning("%s", error.message, exc_info=error.__cause__)
    return answer


def as_json(body: object, status: int = 200) -> web.Response:
    """Return an answer with ``body`` encoded as JSON."""
    return web.Response(body=_encode(body), status=status, content_type="application/json")


def _error_body(status: int, message: str, kind: str, param: str | None, code: str | None) -> web.Response:
    return as_json(ErrorBody(Problem(message, kind, param, code)), status)
