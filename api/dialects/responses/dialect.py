"""The dialect of the Responses API, and what the dialects that are like it share with it."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from penstock.api.conversations import Conversations
from penstock.api.dialect import Dialect, Edge
from penstock.api.dialects.responses.form import PLAIN, hiding, reader
from penstock.api.dialects.responses.routes import Responses
from penstock.api.http.conventions import OPENAI, Conventions
from penstock.api.http.wire import Wire
from penstock.api.models import ModelList
from penstock.api.socket.socket import Sockets


def like_responses(name: str, base: str, wire: Wire, conventions: Conventions = OPENAI) -> Dialect:
    """Return a dialect with all routes and bodies of the Responses API, whose answers have another form."""
    return Dialect(name, base, reader(wire), wire, _routes, conventions)


def _routes(edge: Edge) -> Sequence[web.RouteDef]:
    scheduler = edge.scheduler
    return (
        *Responses(edge, hiding(edge.dialect.wire)).routes(edge.base),
        *Sockets(edge).routes(edge.base),
        *Conversations(scheduler.store, scheduler.admission).routes(edge.base),
        *ModelList(scheduler.engine, scheduler.aliases).routes(edge.base),
    )


WITH_BARE_KEYS = Conventions(key_headers=("Authorization", "x-api-key"))
"""The conventions of OpenAI, but that a key may be bare, as Anthropic's clients send it: they list the models here."""

RESPONSES = like_responses("responses", "/v1", PLAIN, WITH_BARE_KEYS)
