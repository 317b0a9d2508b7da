"""The dialect of Chat Completions: its routes, and the forms of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from aiohttp import web

from penstock.api.dialect import REFUSALS, Dialect, Edge
from penstock.api.http.chunks import encode, fault, obfuscated
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.wire import Reading, Wire
from penstock.extensions.dialects.chat.body import ChatBody
from penstock.extensions.dialects.chat.chunks import Chunks, choices
from penstock.extensions.dialects.chat.completion import ChatCompletion, completion
from penstock.extensions.dialects.chat.stored_routes import StoredRoutes
from penstock.extensions.dialects.older_body import StreamOptions
from penstock.pipeline.core import Pipeline
from penstock.pipeline.protocol.events import DONE
from penstock.pipeline.protocol.params.validation import read_body


@cache
def wire(*, usage: bool = True, lists_usage: bool = False, hides: bool = False, counts: bool = False) -> Wire:
    """Return the form of an answer, with or without the usage; ``hides`` pads each chunk to hide its length.

    With ``counts``, each chunk has the usage so far.
    """
    chunks = partial(Chunks, usage, lists_usage)
    return Wire(
        obfuscated if hides else encode,
        completion,
        Pipeline.start("chat", chunks()),
        choices,
        end=DONE,
        fault=fault,
        counting=(lambda so_far: Pipeline.start("chat", chunks(so_far))) if counts else None,
    )


def read(body: bytes) -> Reading:
    """Read the body of a request for a completion."""
    given = read_body(body, ChatBody)
    first, *others = given.create_requests
    return Reading(first, _form(given), bool(given.stream), place=given.places, others=tuple(others))


def _form(given: ChatBody) -> Wire:
    if not given.stream:
        return wire()
    options = given.stream_options or StreamOptions()
    wants_usage = options.include_usage is True
    counts = wants_usage and options.continuous_usage_stats is True
    hides = options.include_obfuscation is True
    return wire(usage=wants_usage, lists_usage=wants_usage, hides=hides, counts=counts)


def routes(edge: Edge) -> Sequence[web.RouteDef]:
    """Return the routes of Chat Completions."""
    stored = StoredRoutes(edge)

    @operation(Operation(ChatCompletion, body=ChatBody, refusals=REFUSALS, streams=True))
    async def create(request: web.Request) -> web.StreamResponse:
        """Create a chat completion, as a stream of chunks or as one object."""
        return await edge.create(request, stored.record)

    return [web.post(f"{edge.base}/chat/completions", create), *stored.routes(edge.base)]


CHAT = Dialect("chat", base="/v1", read=read, wire=wire(), routes=routes)
