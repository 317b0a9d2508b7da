"""The path of a request in this application, which another one may have mounted under a prefix."""

from __future__ import annotations

from aiohttp import web

DESCRIPTION = "/openapi.json"
"""The path of a route that every application of this server has."""

DESCRIPTION_NAME = "openapi"


def prefix_of(request: web.Request) -> str:
    """Return the path under which the application is mounted, percent-encoded; empty if it is not mounted."""
    return request.app.router[DESCRIPTION_NAME].url_for().raw_path.removesuffix(DESCRIPTION)


def path_of(request: web.Request) -> str:
    """Return the path of a request without the prefix, percent-encoded."""
    return request.rel_url.raw_path.removeprefix(prefix_of(request))


PROBES = frozenset({"/health", "/load", "/metrics", "/ping", "/ready"})
"""The paths that are read too often to be logged or traced."""


def is_probe(request: web.Request) -> bool:
    """Return True if a request only looks after this server."""
    return path_of(request) in PROBES
