"""The prefix under which another application has mounted this one."""

from __future__ import annotations

from aiohttp import web

DESCRIPTION = "/openapi.json"
"""The path of a route that every application of this server has."""

DESCRIPTION_NAME = "openapi"


def prefix_of(request: web.Request) -> str:
    """Return the path under which the application is mounted, percent-encoded; empty if it is not mounted."""
    return request.app.router[DESCRIPTION_NAME].url_for().raw_path.removesuffix(DESCRIPTION)
