"""The access log: one line for each request with its outcome, duration and client, but without any content.

The line of a refused request ends with the error that its client got, which may quote the start of a wrong value.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec
from aiohttp import hdrs, web

from penstock.api.http.auth import OWNER, REFUSED_KEY, team_of, title_of
from penstock.api.http.bodies import Problem
from penstock.api.http.conventions import REQUEST_ID, REQUEST_ID_HEADER, api_of, conventions_of
from penstock.api.http.errors import ENDED, PROBLEM, REFUSED, STREAMING, Handler, cause_of
from penstock.api.http.openapi import unknown_parameters
from penstock.api.http.prefix import is_probe
from penstock.api.http.proxies import AS_SENT
from penstock.pipeline import metrics
from penstock.pipeline.logs import counted
from penstock.pipeline.protocol.params.json_body import NO_JSON, shortened
from penstock.pipeline.protocol.params.request import REQUEST_ID_PATTERN
from penstock.pipeline.protocol.params.validation import log_ignored
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.format import in_words

logger = logging.getLogger(__name__)

_requests, _seconds = cache(metrics.HTTP_REQUESTS.labels), cache(metrics.HTTP_SECONDS.labels)

RESPONSE: web.RequestKey[Response] = web.RequestKey("response", Response)
"""The response that a request created: in its final state, or queued if it runs in the background."""

MODEL: web.RequestKey[str] = web.RequestKey("model", str)
"""The model that a request names."""

STARTED: web.RequestKey[float] = web.RequestKey("started", float)
"""The time of the monotonic clock at which a request arrived."""

SENT: web.RequestKey[int] = web.RequestKey("sent", int)
"""The status in the headers of the answer, once they go out."""

CLIENT_CLOSED = 499
"""The status, as nginx names it, of a request whose client left before any; in the metrics, before the end."""

NO_API = "none"
"""The name in the metrics for requests that belong to no dialect."""

LONGEST_PATH = 200
"""The most characters of a path in the log."""

LONGEST_REFUSED = 2**20
"""The most bytes of a refused body in which the model is looked up: a millisecond's work."""

LONGEST_REASON = 300
"""The most characters of a client's error in the log."""


@web.middleware
async def log_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Log and measure each request when it is over, even if the client has left, and what it has that is ignored."""
    request[STARTED] = time.monotonic()
    sent = request.headers.get(REQUEST_ID_HEADER, "")
    request[REQUEST_ID] = sent if re.fullmatch(REQUEST_ID_PATTERN, sent) else f"req_{secrets.token_hex(16)}"
    log_ignored(unknown_parameters(request))
    try:
        answer = await handler(request)
    except BaseException as error:
        ended = cause_of(error)
        _log(request, request.get(SENT) or (CLIENT_CLOSED if ended == "client_left" else 500), ended)
        raise
    problem = answer.get(PROBLEM)
    is_failure = answer.get(REFUSED, answer.status) == 500  # each failure has a line of its own
    _log(request, answer.status, answer.get(ENDED), problem, "" if is_failure or not problem else _reason(problem))
    return answer


def _log(
    request: web.Request, status: int, ended: str | None, problem: Problem | None = None, reason: str = ""
) -> None:
    """Log and measure a request that is over; ``ended`` is the cause if it was broken off."""
    level = logging.DEBUG if is_probe(request) else logging.INFO
    seconds = time.monotonic() - request[STARTED]
    if logger.isEnabledFor(level):
        text, fields = _line(request, status, seconds, ended, problem, reason)
        logger.log(level, "%s", text, extra=fields)
    _measure(request, status, seconds, has_left=ended == "client_left")


def _line(
    request: web.Request, status: int, seconds: float, ended: str | None, problem: Problem | None, reason: str
) -> tuple[str, dict[str, Any]]:
    """Return the line about a request, and its fields for a log in JSON."""
    response = request.get(RESPONSE)
    is_cut = ended == "raised"
    outcome = ", failed" if is_cut else f", {outcome_of(response)}" if response else ""
    way = f", {in_words(ended)} after" if ended and not is_cut else " in"
    model = response.model if response else request.get(MODEL)
    fields = _fields(request, status, seconds, model) | {"ended": ended}
    if response:
        fields |= fields_of(response)
        if response.error and not reason:
            reason = f": {response.error.code}: {shortened(response.error.message)}"
    fields |= _error(problem)
    if is_cut:
        fields["response_status"] = "failed"
    text = f"{request.method} {_path(request)}: {status}{outcome}{way} {seconds:.3f} s"
    return f"{text} ({_client(request, model)}){reason}", fields


def _measure(request: web.Request, status: int, seconds: float, *, has_left: bool) -> None:
    """Count a request, and note how long it took; its labels hold no text of the client."""
    method = request.method if request.method in hdrs.METH_ALL else "other"
    api, route = api_of(request) or NO_API, _route(request)
    _requests(api, method, route, CLIENT_CLOSED if has_left else status).inc()
    _seconds(api, method, route).observe(seconds)
    if has_left:
        streams = "stream" if request.method == hdrs.METH_POST else "resume"
        metrics.DISCONNECTS.labels(streams if request.get(STREAMING) else "sync").inc()


def log_exchange(
    request: web.Request, outcome: Response | web.Response, started: float, model: str | None = None
) -> None:
    """Log one response, or one refused request, of the connection that ``request`` has upgraded."""
    seconds, reason = time.monotonic() - started, ""
    if isinstance(outcome, Response):
        done, model, status, about = outcome_of(outcome), outcome.model, 200, fields_of(outcome)
    else:
        problem = outcome.get(PROBLEM)
        reason = _reason(problem) if problem and outcome.status != 500 else ""
        status, about = outcome.status, _error(problem)
        done = str(status)
    text = f"WebSocket {_path(request)}: {done} in {seconds:.3f} s ({_client(request, model)}){reason}"
    logger.info("%s", text, extra=_fields(request, status, seconds, model) | about)


def _fields(request: web.Request, status: int, seconds: float, model: str | None) -> dict[str, Any]:
    """Return the fields of the line about a request, for a log in JSON; those that are None are left out."""
    return {
        "request_id": request[REQUEST_ID],
        "client": request[AS_SENT].address,
        "key": title_of(request) or None,
        "owner": (request.get(OWNER) or "")[:8] or None,
        "team": team_of(request) or None,
        "refused_key": request.get(REFUSED_KEY) or None,
        "method": request.method,
        "path": _path(request),
        "route": _route(request),
        "api": api_of(request),
        "status": status,
        "seconds": round(seconds, 6),
        "model": shortened(model) if model else None,
    }


def fields_of(response: Response) -> dict[str, Any]:
    """Return the fields of a line about a response, for a log in JSON."""
    usage = response.usage
    tokens = {}
    if usage:
        tokens = {
            "input_tokens": usage.input_tokens,
            "cached_tokens": usage.input_tokens_details.cached_tokens,
            "output_tokens": usage.output_tokens,
        }
    code = response.error.code if response.error else None
    return {"response_id": response.id, "response_status": response.status, "code": code, **tokens}


def _error(problem: Problem | None) -> dict[str, Any]:
    if problem is None:
        return {}
    return {
        "code": problem.code or problem.type,
        "param": problem.param and shortened(problem.param),
        "reason": shortened(problem.message, LONGEST_REASON),
    }


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource else "unknown"


def _path(request: web.Request) -> str:
    return request.rel_url.raw_path[:LONGEST_PATH]  # still escaped: a line break would fake a second line


class _Named(msgspec.Struct):
    model: str = ""


def name_model(request: web.Request, refused: bytes) -> None:
    """Name the model of a body that was refused, for the log; a long body is not read again."""
    if len(refused) <= LONGEST_REFUSED:
        with suppress(*NO_JSON):
            request[MODEL] = msgspec.json.decode(refused, type=_Named).model


def client_request_id(request: web.Request, in_body: str | None) -> str:
    """Return the client's own id of a request: that of its headers, or else ``in_body``, vLLM's parameter.

    An id in the headers that cannot stand in a log counts as none, and is empty.
    """
    sent = request.headers.get(REQUEST_ID_HEADER)
    if sent is None:
        return in_body or ""
    return sent if sent == request[REQUEST_ID] else ""


async def note_status(request: web.Request, answer: web.StreamResponse) -> None:
    """Note the status of an answer when its headers go out, for a line about one that does not end."""
    request[SENT] = answer.status


async def add_request_id(request: web.Request, answer: web.StreamResponse) -> None:
    """Add the id of the request to its answer, before the headers are sent."""
    if REQUEST_ID in request:
        for header in (REQUEST_ID_HEADER, conventions_of(request).request_id_header):
            answer.headers[header] = request[REQUEST_ID]


def _client(request: web.Request, model: str | None) -> str:
    """Return the client's address, the name of its key, the model, and the id of the request."""
    title = title_of(request)
    refused = request.get(REFUSED_KEY)
    key = (f"key {title}",) if title else (f"refused key {refused}",) if refused else ()
    named = (f"model {_visible(shortened(model))}",) if model else ()
    return ", ".join((request[AS_SENT].address or "unknown address", *key, *named, request[REQUEST_ID]))


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
    read = counted(usage.input_tokens, "token") if usage else ""
    return response.status + (f", {read} in, {usage.output_tokens} out" if usage else "")
