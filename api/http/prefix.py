"""The path of a request in this application: an application around it, or a proxy, may put it under a prefix."""

from __future__ import annotations

import re

from aiohttp import web

from penstock.api.http.proxies import AS_SENT

DESCRIPTION = "/openapi.json"
"""The path of a route that every application of this server has."""

DESCRIPTION_NAME = "openapi"


def mount_of(request: web.Request) -> str:
    """Return the path under which the application is mounted, percent-encoded; empty if it is not mounted."""
    return request.app.router[DESCRIPTION_NAME].canonical.removesuffix(DESCRIPTION)


def prefix_of(request: web.Request) -> str:
    """Return the path before each route as the client writes it, percent-encoded; empty if there is none."""
    return request[AS_SENT].prefix + mount_of(request)


def path_of(request: web.Request) -> str:
    """Return the path of a request without the mount, percent-encoded."""
    return request.rel_url.raw_path.removeprefix(mount_of(request))


def without_doubling(path: str) -> str:
    """Return a path that begins with ``/v1`` once where a client has added it to a base URL that had it already."""
    return re.sub(r"(/v1){2,}(?=/|$)", "/v1", path)


PROBES = frozenset({"/health", "/load", "/metrics", "/ping", "/ready"})
"""The paths that are read too often to be logged or traced."""


def is_probe(request: web.Request) -> bool:
    """Return True if a request only looks after this server."""
    return path_of(request) in PROBES
