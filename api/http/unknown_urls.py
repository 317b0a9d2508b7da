"""Requests that match no route: their errors name the API that they try, as many clients try URLs of other servers."""

from __future__ import annotations

import re

from aiohttp import web

from penstock.api.http.conventions import Spoken, spoken_by
from penstock.api.http.prefix import prefix_of
from penstock.pipeline.protocol.params.json_body import shortened

_RESPONSES = "This server speaks the Responses API: POST /v1/responses."
_ROUTES = "GET /openapi.json describes all routes."

ELSEWHERE = {
    "/chat/completions": f"{_RESPONSES} Its 'input' takes the 'messages'; run `vllm serve` beside it for chats.",
    "/completions": f"{_RESPONSES} Its 'input' takes the 'prompt'; run `vllm serve` beside it for Completions.",
    "/(embeddings|rerank|score|pooling|classify)": f"{_RESPONSES} Run `vllm serve` beside it for this one.",
    "(?<!/v1)/(responses|conversations|models)(/.*)?": f"The routes are under /v1. {_ROUTES}",
    "/(docs|redoc)": f"{_ROUTES} In a browser, GET / is a page to try them.",
    "/metrics": "The metrics are on the port of --metrics-port.",
    "/version": "GET /openapi.json has the version of this server.",
    "/(ping|healthz|livez|readyz)": "GET /health and GET /ready report the state of this server.",
    "/(tokenize|detokenize)": "POST /v1/responses/input_tokens counts the tokens of a request.",
}
"""Patterns for the ends of URLs of other servers, each with the advice that the client gets; the first match counts."""

BASE = "/v1"
"""The base URL that other servers have, too."""

MOST_ROUTES = 4
"""The most routes that an error names."""

LONGEST = 200
"""The characters at the end of a URL in which the patterns are searched for."""


def explained(error: web.HTTPException, request: web.Request) -> tuple[str, str | None]:
    """Return OpenAI's message and code for an error of aiohttp, with the request to send instead."""
    sent = f"{request.method} {shortened(request.rel_url.raw_path)}"  # still escaped
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return f"Not allowed: {sent}. This URL takes {allowed}.", "method_not_supported"
    if isinstance(error, web.HTTPNotFound):
        return f"Unknown request URL: {sent}. {_advice(request)}", "unknown_url"
    return error.reason, None


def _advice(request: web.Request) -> str:
    spoken, prefix = spoken_by(request), prefix_of(request)
    advice = _elsewhere(request.path) if spoken is None or spoken.base == BASE else _routes_of(spoken)
    return advice.replace(" /", f" {prefix}/")


def _elsewhere(path: str) -> str:
    path = path[-LONGEST:].rstrip("/")
    found = (advice for pattern, advice in ELSEWHERE.items() if re.search(f"{pattern}$", path))
    return next(found, f"{_RESPONSES} {_ROUTES}")


def _routes_of(spoken: Spoken) -> str:
    more = " and others" if len(spoken.routes) > MOST_ROUTES else ""
    return f"Here is the API {spoken.name}: {', '.join(spoken.routes[:MOST_ROUTES])}{more}. {_ROUTES}"
