"""The conventions of a dialect over HTTP: its headers, and its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from penstock.api.http.bodies import ErrorBody, Problem
from penstock.api.http.prefix import path_of

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
"""The id of a request: that of its ``X-Request-Id`` header or of its body, or one of this server."""


@dataclass(frozen=True, slots=True)
class RequestError:
    """A problem of a request, or of the rest of its stream, with the status that the Responses API gives it.

    ``last`` is the last rewritten event of a stream that breaks off, if there is one.
    """

    status: int
    problem: Problem
    request_id: str = ""
    last: Any = None


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
class Spoken:
    """A dialect as its clients see it: its routes, each as ``METHOD /path``, are under the URL ``base``."""

    name: str
    base: str
    conventions: Conventions
    routes: tuple[str, ...]


@dataclass(frozen=True)
class SpokenByRoute:
    """The dialects of the routes of an application, and those below each base URL for paths without a route."""

    of_resources: dict[web.AbstractResource, Spoken] = field(default_factory=dict)
    of_bases: dict[str, Spoken] = field(default_factory=dict)

    def add(self, spoken: Spoken, routes: Iterable[web.AbstractRoute]) -> None:
        """Add a dialect with its routes; of two with the same base URL, the first has the paths without a route."""
        self.of_bases.setdefault(spoken.base, spoken)
        for route in routes:
            if route.resource:
                self.of_resources[route.resource] = spoken

    def of(self, request: web.Request) -> Spoken | None:
        """Return the dialect that a request speaks, if any."""
        if resource := request.match_info.route.resource:
            return self.of_resources.get(resource)
        path = path_of(request)
        within = [base for base in self.of_bases if f"{path}/".startswith(f"{base}/")]
        return self.of_bases[max(within, key=len)] if within else None


SPOKEN = web.AppKey("spoken", SpokenByRoute)


def spoken_by(request: web.Request) -> Spoken | None:
    """Return the dialect that a request speaks; None for requests that belong to no dialect."""
    return request.app[SPOKEN].of(request) if SPOKEN in request.app else None


def api_of(request: web.Request) -> str | None:
    """Return the name of the dialect that a request speaks, for metrics and the log."""
    spoken = spoken_by(request)
    return spoken.name if spoken else None


def conventions_of(request: web.Request) -> Conventions:
    """Return the conventions of the dialect that a request speaks."""
    spoken = spoken_by(request)
    return spoken.conventions if spoken else OPENAI
