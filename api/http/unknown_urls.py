"""Requests that match no route: their errors name the routes that exist, as many clients try URLs of other servers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus

from aiohttp import web

from penstock.api.http.conventions import SPOKEN, Spoken
from penstock.api.http.prefix import path_of, prefix_of, without_doubling
from penstock.pipeline.protocol.params.json_body import shortened

_ROUTES = "GET /openapi.json describes all routes."

_UNREAD = "A model of [models] whose kind fits answers such requests"

ELSEWHERE = {
    "/v1/embeddings|/v2/embed|(/v[12])?/rerank|(/v1)?/score|/pooling": f"{_UNREAD}, or the server of --embeddings.",
    "/embeddings|/v1/pooling": f"The model of this server writes text. {_ROUTES}",
    "(/v1)?/classify|/v1/audio/(speech|transcriptions|translations)|/v1/images/(generations|edits)": f"{_UNREAD}.",
    "/(responses|conversations|models|chat/completions|messages)(/.*)?": f"The routes are under /v1. {_ROUTES}",
    "/(docs|redoc)": f"{_ROUTES} In a browser, GET / is a page to try them.",
    "/metrics": "The metrics are on the port of --metrics-port.",
    "/(healthz|livez|readyz)": "GET /health and GET /ready report the state of this server.",
}
"""Patterns for URLs of other servers, each with the advice that the client gets; the first match counts."""

MOST_ROUTES = 4
"""The most routes that an error names of one dialect, or of all."""

LONGEST = 200
"""The characters of a path up to which it is compared with the patterns."""


def explained(error: web.HTTPException, request: web.Request) -> tuple[str, str | None]:
    """Return OpenAI's message and code for an error of aiohttp, with the request to send instead."""
    sent = f"{request.method} {shortened(request.rel_url.raw_path)}"  # still escaped
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return f"Not allowed: {sent}. This URL takes {allowed}.", "method_not_supported"
    if isinstance(error, web.HTTPNotFound):
        return f"Unknown request URL: {sent}. {_advice(request)}", "unknown_url"
    return HTTPStatus(error.status).phrase, None


def _advice(request: web.Request) -> str:
    path, by_route = path_of(request), request.app[SPOKEN]
    advice = _doubled(path) or _elsewhere(path) or _routes_of(by_route.below(path) or by_route.first)
    return advice.replace(" /", f" {prefix_of(request)}/")


def _doubled(path: str) -> str:
    if path == (meant := without_doubling(path)):
        return ""
    once = f"leave one out of the client's base URL, so that the request goes to {shortened(meant)}"
    return f"The path has v1 twice: {once}. {_ROUTES}"


def _elsewhere(path: str) -> str:
    path = path.rstrip("/") if len(path) <= LONGEST else ""
    return next((advice for pattern, advice in ELSEWHERE.items() if re.fullmatch(pattern, path)), "")


def _routes_of(dialects: Sequence[Spoken]) -> str:
    """Name routes of one dialect, or the first route of each of several."""
    if len(dialects) == 1:
        (spoken,) = dialects
        more = " and others" if len(spoken.routes) > MOST_ROUTES else ""
        return f"Here is the API {spoken.name}: {', '.join(spoken.routes[:MOST_ROUTES])}{more}. {_ROUTES}"
    return f"This server has {', '.join(spoken.routes[0] for spoken in dialects[:MOST_ROUTES])}. {_ROUTES}"
