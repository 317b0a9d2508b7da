"""The dialect of Completions: its route, and the forms of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

from aiohttp import web

from penstock.api.dialect import REFUSALS, Dialect, Edge
from penstock.api.http.chunks import encode, fault, obfuscated
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.wire import Reading, Wire
from penstock.extensions.dialects.completions.body import PLACES, CompletionBody
from penstock.extensions.dialects.completions.chunks import Chunk, Chunks, CompletionEvent, choices, completion
from penstock.extensions.dialects.older_body import StreamOptions
from penstock.pipeline.core import Pipeline
from penstock.pipeline.protocol.events import DONE, ResponseEvent
from penstock.pipeline.protocol.params.validation import read_body
from penstock.services.usage import Tally

STAGE = "completions"
"""The name of the stage that writes the chunks."""


@cache
def wire(chunks: Chunks, of_each: int = 1, *, hides: bool = False, counts: bool = False, tokens: bool = False) -> Wire:
    """Return the form of an answer with ``of_each`` choices of each prompt; ``hides`` pads the chunks.

    With ``counts``, each chunk has the usage so far, and with ``tokens`` the ids of its tokens.
    """

    def counting(tally: Tally) -> Pipeline[ResponseEvent, CompletionEvent]:
        so_far, kept = tally.usage if counts else None, tally if tokens else None
        return Pipeline.start(STAGE, replace(chunks, so_far=so_far, tally=kept))

    return Wire(
        obfuscated if hides else encode,
        completion,
        Pipeline.start(STAGE, chunks),
        partial(choices, of_each=of_each),
        end=DONE,
        fault=fault,
        counting=counting if counts or tokens else None,
    )


def place(param: str) -> str:
    """Return the place in a body of a parameter of its request."""
    return PLACES.get(param, param)


def read(body: bytes) -> Reading:
    """Read the body of a request for a completion."""
    given = read_body(body, CompletionBody)
    first, *others = given.create_requests
    return Reading(first, _form(given), bool(given.stream), place=place, others=tuple(others))


def _form(given: CompletionBody) -> Wire:
    echoes, tokens = given.echo is True, given.return_token_ids is True
    if not given.stream:
        return wire(Chunks(echoes=echoes), given.choices, tokens=tokens)
    options = given.stream_options or StreamOptions()
    wants_usage = options.include_usage is True
    counts = wants_usage and options.continuous_usage_stats is True
    hides = options.include_obfuscation is True
    return wire(Chunks(wants_usage, wants_usage, echoes), given.choices, hides=hides, counts=counts, tokens=tokens)


def routes(edge: Edge) -> Sequence[web.RouteDef]:
    """Return the routes of Completions."""

    @operation(Operation(Chunk, body=CompletionBody, refusals=REFUSALS, streams=True))
    async def create(request: web.Request) -> web.StreamResponse:
        """Continue one prompt or several, as a stream of chunks or as one object."""
        return await edge.create(request)

    return [web.post(f"{edge.base}/completions", create)]


COMPLETIONS = Dialect("completions", base="/v1", read=read, wire=wire(Chunks()), routes=routes)
