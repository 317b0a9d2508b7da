"""The conventions of a dialect over HTTP: its headers, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from penstock.api.http.bodies import ErrorBody, Problem
from penstock.api.http.prefix import path_of

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
"""The id of a request: that of its ``X-Request-Id`` header or of its body, or one of this server."""


@dataclass(frozen=True, slots=True)
class RequestError:
    """A problem of a request, or of the rest of its stream, with the status that the Responses API gives it."""

    status: int
    problem: Problem
    request_id: str = ""


def openai_error(error: RequestError) -> tuple[int, Any]:
    """Return the status and the body of an error of OpenAI."""
    return error.status, ErrorBody(error.problem)


@dataclass(frozen=True)
class Conventions:
    """The headers and the errors of a dialect.

    ``key_headers`` may carry the key of a client: ``Authorization`` as ``Bearer KEY``, any other header the bare key.
    The first one of them that a request has counts.  ``request_id_header`` carries the id of a request in its answer.
    ``error`` returns the status and the body for a `RequestError`: an object that msgspec encodes, of the type
    ``error_body``.
    """

    key_headers: tuple[str, ...] = ("Authorization",)
    request_id_header: str = "X-Request-Id"
    error: Callable[[RequestError], tuple[int, Any]] = openai_error
    error_body: Any = ErrorBody


OPENAI = Conventions()
"""The conventions of OpenAI, which also hold for requests that belong to no dialect."""


@dataclass(frozen=True)
class ConventionsByRoute:
    """The conventions of the routes of an application, and those below each base URL for paths without a route."""

    of_resources: dict[web.AbstractResource, Conventions] = field(default_factory=dict)
    of_bases: dict[str, Conventions] = field(default_factory=dict)

    def of(self, request: web.Request) -> Conventions:
        """Return the conventions that hold for a request."""
        if resource := request.match_info.route.resource:
            return self.of_resources.get(resource, OPENAI)
        path = path_of(request)
        within = [base for base in self.of_bases if path.startswith(f"{base}/")]
        return self.of_bases[max(within, key=len)] if within else OPENAI


CONVENTIONS = web.AppKey("conventions", ConventionsByRoute)


def conventions_of(request: web.Request) -> Conventions:
    """Return the conventions of the dialect that a request speaks."""
    return request.app[CONVENTIONS].of(request) if CONVENTIONS in request.app else OPENAI
