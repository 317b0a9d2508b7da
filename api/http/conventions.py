"""The conventions of a dialect over HTTP: its headers, and its errors."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from posixpath import commonpath
from typing import Any, TypeVar

from aiohttp import web

from penstock.api.http.bodies import ErrorBody, Problem
from penstock.api.http.prefix import path_of, without_doubling

REQUEST_ID_HEADER = "X-Request-Id"
"""The header that carries the id of a request, in requests and in answers, whatever the dialect."""

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
    The first one of them with a valid key counts.  ``request_id_header`` carries the id of a request in
    its answer, beside ``X-Request-Id``.
    ``error`` returns the status and the body for a `RequestError`: an object that msgspec encodes, of the type
    ``error_body``.  Only clients of the dialect send the header ``mark``, which tells them on routes that are no
    dialect's, or `of_several_apis`.
    """

    key_headers: tuple[str, ...] = ("Authorization", "x-api-key")
    request_id_header: str = REQUEST_ID_HEADER
    error: Callable[[RequestError], tuple[int, Any]] = openai_error
    error_body: Any = ErrorBody
    mark: str = ""


AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])

_SHARED = "is_shared"


def of_several_apis(handler: AnyHandler) -> AnyHandler:
    """Let a handler of a route that several APIs have answer each client in the form of its own API."""
    handler.__dict__[_SHARED] = True
    return handler


_DIALECT = "dialect"


def of_dialect(name: str) -> Callable[[AnyHandler], AnyHandler]:
    """Let a handler of a resource answer in the form of the dialect of that name, if the server speaks it."""

    def mark(handler: AnyHandler) -> AnyHandler:
        handler.__dict__[_DIALECT] = name
        return handler

    return mark


def dialect_of(handler: object) -> str:
    """Return the name of the dialect in whose form a handler of a resource answers; empty if it is that of OpenAI."""
    name: str = getattr(handler, _DIALECT, "")
    return name


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
    of_bases: dict[str, list[Spoken]] = field(default_factory=dict)

    def add(self, spoken: Spoken, routes: Iterable[web.AbstractRoute]) -> None:
        """Add a dialect with its routes."""
        self.of_bases.setdefault(spoken.base, []).append(spoken)
        for route in routes:
            if route.resource:
                self.of_resources[route.resource] = spoken

    def of(self, request: web.Request) -> Spoken | None:
        """Return the dialect that a request speaks, if any."""
        route = request.match_info.route
        if route.resource is None:
            return self.without_route(path_of(request), request.headers)
        own = self.of_resources.get(route.resource) or self._named(dialect_of(route.handler))
        is_shared = own is None or getattr(route.handler, _SHARED, False)
        return (self._marked(request.headers) if is_shared else None) or own

    def without_route(self, path: str, headers: Container[str]) -> Spoken | None:
        """Return the dialect of a request without a route: that of its mark, or that with the most similar routes."""
        return self._marked(headers) or self.nearest(without_doubling(path))

    def _named(self, name: str) -> Spoken | None:
        return next((spoken for below in self.of_bases.values() for spoken in below if spoken.name == name), None)

    def _marked(self, headers: Container[str]) -> Spoken | None:
        """Return the dialect whose mark is in the headers of a request."""
        marks = ((spoken.conventions.mark, spoken) for below in self.of_bases.values() for spoken in below)
        return next((spoken for mark, spoken in marks if mark and mark in headers), None)

    def nearest(self, path: str) -> Spoken | None:
        """Return the dialect with the routes that are most similar to a path."""
        return max(self.below(path), key=lambda spoken: _shared(spoken, path), default=None)

    @property
    def first(self) -> Sequence[Spoken]:
        """The dialects with the same base URL as the first one."""
        return next(iter(self.of_bases.values()), ())

    def below(self, path: str) -> Sequence[Spoken]:
        """Return the dialects whose base URL is the longest above a path."""
        within = [base for base in self.of_bases if f"{path}/".startswith(f"{base}/")]
        return self.of_bases[max(within, key=len)] if within else ()


def _shared(spoken: Spoken, path: str) -> int:
    """Return the most characters that a path begins with as a route of a dialect does, in whole segments."""
    routes = [route.partition(" ")[2] for route in spoken.routes]
    return max((len(commonpath((route, path))) for route in routes), default=0)


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
