"""The access log: one line for each request with its outcome, duration and client, but without any content.

The line of a refused request ends with the error that its client got, which may quote the start of a wrong value.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from contextlib import suppress

import msgspec
from aiohttp import web

from penstock.api.http.auth import OWNER
from penstock.api.http.bodies import Problem
from penstock.api.http.errors import PROBLEM, Handler
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.request import REQUEST_ID_PATTERN
from penstock.pipeline.protocol.response import Response

logger = logging.getLogger(__name__)

RESPONSE: web.RequestKey[Response] = web.RequestKey("response", Response)
"""The response that a request created: in its final state, or queued if it runs in the background."""

MODEL: web.RequestKey[str] = web.RequestKey("model", str)
"""The model that a request names."""

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
"""The id of a request: that of its ``X-Request-Id`` header or of its body, or one of this server."""

LONGEST_PATH = 200
"""The most characters of a path in the log."""

LONGEST_REFUSED = 2**20
"""The most bytes of a refused body in which the model is looked up: a millisecond's work."""

LONGEST_REASON = 300
"""The most characters of a client's error in the log."""


@web.middleware
async def log_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Log each request when it is over, even if the client has left."""
    started = time.monotonic()
    sent = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = sent if re.fullmatch(REQUEST_ID_PATTERN, sent) else f"req_{secrets.token_hex(16)}"
    answered, reason = "broken off", ""
    try:
        answer = await handler(request)
        answered = str(answer.status)
        if answer.status < 500 and (problem := answer.get(PROBLEM)):  # other failures have lines of their own
            reason = _reason(problem)
        return answer
    finally:
        level = logging.DEBUG if request.path.endswith("/health") else logging.INFO
        response = request.get(RESPONSE)
        outcome = answered + (f", {outcome_of(response)}" if response else "")
        client = _client(request, response.model if response else request.get(MODEL))
        _log(level, f"{request.method} {_path(request)}: {outcome}", started, f"({client}){reason}")


def log_exchange(
    request: web.Request, outcome: Response | web.Response, started: float, model: str | None = None
) -> None:
    """Log one response, or one refused request, of the connection that ``request`` has upgraded."""
    if isinstance(outcome, Response):
        done, client, reason = outcome_of(outcome), _client(request, outcome.model), ""
    else:
        problem = outcome.get(PROBLEM)
        reason = _reason(problem) if problem and outcome.status < 500 else ""
        done, client = str(outcome.status), _client(request, model)
    _log(logging.INFO, f"WebSocket {_path(request)}: {done}", started, f"({client}){reason}")


def _log(level: int, event: str, started: float, about: str) -> None:
    logger.log(level, "%s in %.3f s %s", event, time.monotonic() - started, about)


def _path(request: web.Request) -> str:
    return request.rel_url.raw_path[:LONGEST_PATH]  # still escaped: a line break would fake a second line


class _Named(msgspec.Struct):
    model: str = ""


def name_model(request: web.Request, refused: bytes) -> None:
    """Name the model of a body that was refused, for the log; a long body is not read again."""
    if len(refused) <= LONGEST_REFUSED:
        with suppress(msgspec.MsgspecError, RecursionError):
            request[MODEL] = msgspec.json.decode(refused, type=_Named).model


def take_request_id(request: web.Request, in_body: str | None) -> str:
    """Name a request by the ``request_id`` of its body, vLLM's parameter, if its headers do not name it.

    Returns the id if it is the client's, and else an empty text.
    """
    if in_body and "X-Request-Id" not in request.headers:
        request[REQUEST_ID] = in_body
    request_id = request[REQUEST_ID]
    return request_id if request_id in (in_body, request.headers.get("X-Request-Id")) else ""


async def add_request_id(request: web.Request, answer: web.StreamResponse) -> None:
    """Add the id of the request to its answer, before the headers are sent."""
    if REQUEST_ID in request:
        answer.headers["X-Request-Id"] = request[REQUEST_ID]


def _client(request: web.Request, model: str | None) -> str:
    """Return the client's address, the first digits of its key's digest, the model, and the id of the request."""
    owner = request.get(OWNER)
    key = (f"key {owner[:8]}",) if owner else ()
    named = (f"model {_visible(shortened(model))}",) if model else ()
    return ", ".join((request.remote or "unknown address", *key, *named, request[REQUEST_ID]))


def _reason(problem: Problem) -> str:
    """Describe the error that a client got."""
    facts = (("param", problem.param), ("code", problem.code))
    named = ", ".join(f"{name} {value}" for name, value in facts if value)
    return _visible(f": {shortened(problem.message, LONGEST_REASON)}{f' ({shortened(named)})' if named else ''}")


def _visible(text: str) -> str:
    """Escape all characters that are not printable: a line break would fake a second line."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def outcome_of(response: Response) -> str:
    """Describe a response by its status and its token counts."""
    usage = response.usage
    return response.status + (f", {usage.input_tokens} tokens in, {usage.output_tokens} out" if usage else "")
