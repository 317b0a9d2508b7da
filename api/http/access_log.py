"""The access log: one line for each request with its outcome and duration, but without any content."""

from __future__ import annotations

import logging
import time

from aiohttp import web

from penstock.api.http.errors import Handler
from penstock.pipeline.protocol.response import Response

logger = logging.getLogger(__name__)

RESPONSE: web.RequestKey[Response] = web.RequestKey("response", Response)
"""The response that a request created: in its final state, or queued if it runs in the background."""


@web.middleware
async def log_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Log each request when it is over, even if the client has left."""
    started = time.monotonic()
    answered = "broken off"
    try:
        answer = await handler(request)
        answered = str(answer.status)
        return answer
    finally:
        level = logging.DEBUG if request.path == "/health" else logging.INFO
        seconds = time.monotonic() - started
        path = request.rel_url.raw_path  # still escaped, as a line break in it would fake a second line
        logger.log(level, "%s %s: %s%s in %.3f s", request.method, path, answered, _outcome(request), seconds)


def _outcome(request: web.Request) -> str:
    response = request.get(RESPONSE)
    return "" if response is None else f", {outcome_of(response)}"


def outcome_of(response: Response) -> str:
    """Describe a response by its status and its token counts."""
    usage = response.usage
    return response.status + (f", {usage.input_tokens} tokens in, {usage.output_tokens} out" if usage else "")
