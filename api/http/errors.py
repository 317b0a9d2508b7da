"""Errors over HTTP: a failure before the first header becomes an HTTP status with the error body of its dialect.

A stream whose headers are out by then gets it as its last frame (`break_off_begun` in `sse.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from math import ceil
from typing import Any, TypeAlias

import msgspec
from aiohttp import HttpVersion11, hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from msgspec.structs import replace

from penstock.api.http.bodies import Problem
from penstock.api.http.conventions import OPENAI, REQUEST_ID, RequestError, conventions_of
from penstock.api.http.unknown_urls import explained
from penstock.pipeline import errors, metrics
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.logs import Seldom
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.recordings.format import Cause
from penstock.pipeline.tasks import LARGE_BYTES, MANY_VALUES, in_thread, let_go

logger = logging.getLogger(__name__)

STREAMING: web.RequestKey[bool] = web.RequestKey("streaming", bool)
"""Set on a request just before the headers of its stream go out."""

PROBLEM: web.ResponseKey[Problem] = web.ResponseKey("problem", Problem)
"""The error in the body of an answer."""

REFUSED: web.ResponseKey[int] = web.ResponseKey("refused", int)
"""The status that the error at the end of a stream would have before the headers."""

REFUSALS = web.AppKey("refusals", Seldom)
"""The warnings about requests that the server could not serve at that moment, of which a flood causes as many."""

ENDED: web.ResponseKey[str] = web.ResponseKey("ended", str)
"""The `Cause` for which a stream was broken off, though its client is there."""

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

PASSING = (
    errors.ConversationLocked,
    errors.EngineOverloaded,
    errors.ModelAway,
    errors.ServerBusy,
    errors.ServerStopping,
    errors.ServerUnreachable,
    errors.StoreFailed,
)
"""Errors that may be over when the client retries; their answers have a ``Retry-After`` header."""

INVALID = "invalid_request_error"

_encode = msgspec.json.Encoder().encode


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors with the error body of the dialect; after the headers of a stream, close the connection instead."""
    try:
        return await handler(request)
    except ConnectionResetError:
        logger.debug("A client left in the middle of its stream")
        raise asyncio.CancelledError from None  # what aiohttp raises when it notices first; it logs others as bugs
    except Exception as error:
        if request.get(STREAMING):
            raise
        return answer_to(request, error)


def cause_of(error: BaseException) -> Cause:
    """Return the cause that ``error`` is for the end of an answer that had begun."""
    match error:
        case asyncio.CancelledError():
            return "client_left"
        case errors.ServerStopping():
            return "interrupted"
        case _:
            return "raised"


def answer_to(request: web.Request, error: Exception) -> web.Response:
    """Return the answer for an error that was raised before any header, or any event, went out; log bugs."""
    answer = _answer(request, error)
    problem = answer[PROBLEM]
    metrics.REFUSED.labels(problem.code or problem.type).inc()
    return answer


def _answer(request: web.Request, error: Exception) -> web.Response:
    match error:
        case errors.StageError():
            return refusal(request, error)
        case web.HTTPException():
            message, code = explained(error, request)
            answer = as_error(error.status, Problem(message, INVALID, None, code), request)
            if "Allow" in error.headers:
                answer.headers["Allow"] = error.headers["Allow"]
            return answer
        case _:
            path = request.rel_url.raw_path  # still escaped: a line break would fake a second line
            logger.error("%s %s met a bug", request.method, path, exc_info=error)
            problem = Problem("Internal error. The server's log has more.", "server_error", None, "server_error")
            return as_error(500, problem, request)


async def answer_expectation(request: web.Request) -> web.Response | None:
    """Let a client that waits for it send its body; refuse other expectations."""
    if request.version < HttpVersion11:
        return None
    expectation = request.headers.get(hdrs.EXPECT, "")
    if expectation.lower() != "100-continue":
        message = f"This server cannot meet the expectation {shortened(expectation)!r}."
        return as_error(417, Problem(message, INVALID, None, None), request)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the answer has not begun
    return None


def refusal(request: web.Request, error: errors.StageError) -> web.Response:
    """Return the answer to a request that failed with ``error`` before any header went out."""
    answer = as_error(error.status, Problem(error.message, error.type, error.param, error.code), request)
    if isinstance(error, errors.LimitReached | errors.ModelUnavailable | errors.IssuerUnavailable):
        answer.headers["Retry-After"] = str(ceil(error.seconds))
    elif isinstance(error, PASSING):
        answer.headers["Retry-After"] = "1"
    elif isinstance(error, errors.Unauthorized):
        answer.headers["WWW-Authenticate"] = error.challenge
    if isinstance(error, errors.Unauthorized | errors.BudgetSpent):
        answer.headers["X-Should-Retry"] = "false"  # else Claude Code tries for three minutes
    if isinstance(error, errors.StageFault):
        logger.error("%s", error, exc_info=error.__cause__)
    elif not isinstance(error, errors.InvalidRequest | errors.LimitReached | errors.BudgetSpent):
        text = " ".join(named_error(part) for part in (error, error.__cause__) if part)
        request.app[REFUSALS].warn(logger, type(error).__name__, text)
    return answer


def as_json(body: object, status: int = 200) -> web.Response:
    """Return an answer with ``body`` encoded as JSON; one that is large is written in pieces."""
    return _json_answer(_encode(body), status)


def _json_answer(data: bytes, status: int = 200) -> web.Response:
    body = _Pieces(data) if len(data) > LARGE_BYTES else data
    return web.Response(body=body, status=status, content_type="application/json")


class _Pieces(Payload):
    """A large body, between whose pieces other tasks get a turn of the event loop."""

    _value: bytes

    def __init__(self, value: bytes) -> None:
        super().__init__(value)
        self._size = len(value)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._value.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        view = memoryview(self._value)
        for start in range(0, len(view), LARGE_BYTES):
            await writer.write(view[start : start + LARGE_BYTES])
            await asyncio.sleep(0)


async def listed_as_json(body: Any, field: str) -> web.Response:
    """Return an answer like `as_json`, whose list in ``field`` may be long: it is then encoded apart from the loop."""
    values = getattr(body, field)
    if len(values) <= MANY_VALUES:
        return as_json(body)
    answer = _json_answer(await in_thread(_encode_listed, body, field, values))
    let_go(values)
    return answer


def _encode_listed(body: Any, field: str, values: Sequence[Any]) -> bytes:
    """Encode a body, its list in pieces, between which other threads compute."""
    pieces = (_encode(values[start : start + MANY_VALUES])[1:-1] for start in range(0, len(values), MANY_VALUES))
    return _encode(replace(body, **{field: msgspec.Raw(b"[%b]" % b",".join(pieces))}))


def as_error(status: int, problem: Problem, request: web.Request | None = None) -> web.Response:
    """Return an answer with the error body of the dialect that a request speaks."""
    message = problem.message.encode(errors="replace").decode()  # it may quote bytes of a header that are not UTF-8
    problem = replace(problem, message=message)
    conventions = conventions_of(request) if request is not None else OPENAI
    request_id = request.get(REQUEST_ID, "") if request is not None else ""
    status, body = conventions.error(RequestError(status, problem, request_id))
    answer = as_json(body, status)
    answer[PROBLEM] = problem
    return answer
