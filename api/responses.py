"""The routes of the Responses API, over one pipeline.

Streaming and not streaming are two consumers of the same events.  The first event is taken before any header goes out,
so that whatever refuses a request is still an HTTP status; behind it, failures are events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from aiohttp import web

from api.errors import STREAMING, as_json, errors_as_json
from api.stream import SSE_HEADERS, kept_alive, whole
from pipeline.core import Pipeline
from pipeline.errors import ResponseNotFound, ServerStopping, UnsupportedParameter
from pipeline.protocol.events import DONE, ResponseEvent, TerminalEvent, to_sse
from pipeline.protocol.reading import read_request
from pipeline.protocol.request import CreateResponse
from pipeline.protocol.response import Response
from pipeline.record import replay
from stages.generate.engine import Engine
from stages.persist.store import ResponseStore


@dataclass
class Api:
    """The routes, and the requests that run on them."""

    pipeline: Pipeline[CreateResponse, ResponseEvent]
    engine: Engine
    store: ResponseStore
    model: str
    keep_alive: float = 15.0
    """Seconds of silence before a stream says that it lives."""
    stopping: bool = False
    """Whether new requests are turned away."""
    running: int = 0
    """Requests for responses that are being answered."""

    def app(self, max_body_bytes: int) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[errors_as_json], client_max_size=max_body_bytes)
        app.add_routes(
            [
                web.post("/v1/responses", self.create_response),
                web.get("/v1/responses/{response_id}", self.get_response),
                web.get("/v1/models", self.list_models),
                web.get("/health", self.health),
            ]
        )
        return app

    async def finish(self, seconds: float) -> None:
        """Turn new requests away, and wait for those that run, for at most so many ``seconds``."""
        self.stopping = True
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def create_response(self, request: web.Request) -> web.StreamResponse:
        """Create a response, as a stream of events or as one object."""
        if self.stopping:
            raise ServerStopping
        self.running += 1
        try:
            return await self._answer(request)
        finally:
            self.running -= 1

    async def get_response(self, request: web.Request) -> web.Response:
        """Look a stored response up."""
        if request.query.get("stream") == "true":
            raise UnsupportedParameter("This server does not stream stored responses.", param="stream")
        response_id = request.match_info["response_id"]
        stored = await self.store.get(response_id)
        if stored is None:
            raise ResponseNotFound(response_id)
        return as_json(stored.response)

    async def list_models(self, request: web.Request) -> web.Response:
        """Name the one model."""
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "penstock"}
        return as_json({"object": "list", "data": [model]})

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine lives."""
        if self.engine.is_alive:
            return as_json({"status": "ok"})
        return as_json({"status": "engine dead"}, status=503)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        wanted = await read_request(await request.read())
        async with self.pipeline.open(replay([wanted])) as stream, aclosing(whole(stream)) as events:
            first = await anext(events)
            if wanted.stream:
                return await self._stream(request, first, events)
            return as_json(await _last_response(events))

    async def _stream(
        self, request: web.Request, first: ResponseEvent, events: AsyncIterator[ResponseEvent]
    ) -> web.StreamResponse:
        stream = web.StreamResponse(headers=SSE_HEADERS)
        request[STREAMING] = True
        await stream.prepare(request)
        async with kept_alive(stream, self.keep_alive) as write:
            await write(to_sse(first))
            async for event in events:
                await write(to_sse(event))
            await write(DONE)
        await stream.write_eof()
        return stream


async def _last_response(events: AsyncIterator[ResponseEvent]) -> Response:
    async for event in events:
        if isinstance(event, TerminalEvent):
            return event.response
    raise RuntimeError("the stream ended without a terminal event")
