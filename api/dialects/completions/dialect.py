"""The dialect of Completions: its route, and the forms of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from aiohttp import web

from penstock.api.dialect import REFUSALS, Dialect, Edge
from penstock.api.dialects.completions.body import PLACES, CompletionBody
from penstock.api.dialects.completions.chunks import Chunk, Chunks, choices, completion, encode
from penstock.api.http.bodies import ErrorBody
from penstock.api.http.conventions import RequestError
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.wire import Reading, Wire, server_sent
from penstock.pipeline.core import Pipeline
from penstock.pipeline.protocol.events import DONE
from penstock.pipeline.protocol.params.validation import read_body


def fault(error: RequestError) -> bytes:
    """Return the last frames of a stream that breaks off."""
    return server_sent(ErrorBody(error.problem)) + DONE


@cache
def wire(chunks: Chunks, of_each: int = 1) -> Wire:
    """Return the form of an answer in these chunks, with so many choices of each prompt."""
    weave = partial(choices, of_each=of_each)
    return Wire(encode, completion, Pipeline.start("completions", chunks), weave, end=DONE, fault=fault)


def place(param: str) -> str:
    """Return the place in a body of a parameter of its request."""
    return PLACES.get(param, param)


def read(body: bytes) -> Reading:
    """Read the body of a request for a completion."""
    given = read_body(body, CompletionBody)
    streams = bool(given.stream)
    wants_usage = given.stream_options is not None and given.stream_options.include_usage is True
    chunks = Chunks(not streams or wants_usage, streams and wants_usage, given.echo is True)
    first, *others = given.create_requests
    return Reading(first, wire(chunks, given.choices), streams, place=place, others=tuple(others))


def routes(edge: Edge) -> Sequence[web.RouteDef]:
    """Return the routes of Completions."""

    @operation(Operation(Chunk, body=CompletionBody, refusals=REFUSALS, streams=True))
    async def create(request: web.Request) -> web.StreamResponse:
        """Continue one prompt or several, as a stream of chunks or as one object."""
        return await edge.create(request)

    return [web.post(f"{edge.base}/completions", create)]


COMPLETIONS = Dialect("completions", "/v1", read, wire(Chunks()), routes)
