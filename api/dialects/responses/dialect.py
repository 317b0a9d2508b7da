"""The dialect of the Responses API, and what the dialects that are like it share with it."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from penstock.api.dialect import Dialect, Edge
from penstock.api.dialects.responses.form import PLAIN, hiding, reader
from penstock.api.dialects.responses.routes import Responses
from penstock.api.http.wire import Wire
from penstock.api.routes.conversations import Conversations
from penstock.api.routes.models import ModelList
from penstock.api.socket.socket import Sockets


def like_responses(name: str, base: str, wire: Wire) -> Dialect:
    """Return a dialect with all routes and bodies of the Responses API, whose answers have another form."""
    return Dialect(name, base=base, read=reader(wire), wire=wire, routes=_routes)


def _routes(edge: Edge) -> Sequence[web.RouteDef]:
    scheduler = edge.scheduler
    return (
        *Responses(edge, hiding(edge.dialect.wire)).routes(edge.base),
        *Sockets(edge).routes(edge.base),
        *Conversations(scheduler.store, scheduler.admission).routes(edge.base),
        *ModelList(scheduler).routes(edge.base),
    )


RESPONSES = like_responses("responses", "/v1", PLAIN)
