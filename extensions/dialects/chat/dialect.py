"""The dialect of Chat Completions: its routes, and the forms of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from aiohttp import web

from penstock.api.dialect import REFUSALS, Dialect, Edge
from penstock.api.http.chunks import encode, fault, obfuscated
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.wire import Reading, Wire
from penstock.extensions.dialects.chat.body import ChatBody
from penstock.extensions.dialects.chat.chunks import ChatEvent, Chunks, choices
from penstock.extensions.dialects.chat.completion import ChatCompletion, completion
from penstock.extensions.dialects.chat.stored_routes import StoredRoutes
from penstock.extensions.dialects.older_body import StreamOptions
from penstock.pipeline.core import Pipeline
from penstock.pipeline.protocol.events import DONE, ResponseEvent
from penstock.pipeline.protocol.params.validation import read_body
from penstock.services.usage import Tally

STAGE = "chat"
"""The name of the stage that writes the chunks."""

CHUNKS = Chunks()


@cache
def wire(chunks: Chunks = CHUNKS, *, hides: bool = False, counts: bool = False, tokens: bool = False) -> Wire:
    """Return the form of an answer; ``hides`` pads each chunk to hide its length.

    With ``counts``, each chunk has the usage so far, and with ``tokens`` the ids of its tokens.
    """

    def counting(tally: Tally) -> Pipeline[ResponseEvent, ChatEvent]:
        so_far, kept = tally.usage if counts else None, tally if tokens else None
        return Pipeline.start(STAGE, replace(chunks, so_far=so_far, tally=kept))

    return Wire(
        obfuscated if hides else encode,
        completion,
        Pipeline.start(STAGE, chunks),
        choices,
        end=DONE,
        fault=fault,
        counting=counting if counts or tokens else None,
    )


def read(body: bytes) -> Reading:
    """Read the body of a request for a completion."""
    given = read_body(body, ChatBody)
    first, *others = given.create_requests
    return Reading(first, _form(given), bool(given.stream), place=given.places, others=tuple(others))


def _form(given: ChatBody) -> Wire:
    tokens = given.return_token_ids is True
    if not given.stream:
        return wire(tokens=tokens)
    options = given.stream_options or StreamOptions()
    wants_usage = options.include_usage is True
    counts = wants_usage and options.continuous_usage_stats is True
    hides = options.include_obfuscation is True
    return wire(Chunks(wants_usage, wants_usage), hides=hides, counts=counts, tokens=tokens)


def routes(edge: Edge) -> Sequence[web.RouteDef]:
    """Return the routes of Chat Completions."""
    stored = StoredRoutes(edge)

    @operation(Operation(ChatCompletion, body=ChatBody, refusals=REFUSALS, streams=True))
    async def create(request: web.Request) -> web.StreamResponse:
        """Create a chat completion, as a stream of chunks or as one object."""
        return await edge.create(request, stored.record)

    return [web.post(f"{edge.base}/chat/completions", create), *stored.routes(edge.base)]


CHAT = Dialect("chat", base="/v1", read=read, wire=wire(), routes=routes)
