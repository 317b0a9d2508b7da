"""Penstock inside another program: its aiohttp application, and its pipeline.  See ``api/EMBEDDING.md``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from penstock.api.backends import EngineStarter, start
from penstock.api.dialects.responses.form import last_response
from penstock.api.metrics.scrape import bound_for_metrics, serving_metrics
from penstock.api.running import running
from penstock.api.settings import Settings
from penstock.pipeline.core import NamedStage, Pipeline
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.response import Response


@asynccontextmanager
async def pipeline(
    settings: Settings, start_engine: EngineStarter = start
) -> AsyncGenerator[Pipeline[CreateResponse, ResponseEvent], None]:
    """Run the pipeline of these settings without HTTP, for the length of a block.  Its source gives one request."""
    entrance = Entrance()
    async with running(settings, start_engine) as server:
        try:
            yield Pipeline((NamedStage("request", entrance), *server.scheduler.pipeline.steps))
        finally:
            entrance.is_closed = True


@dataclass
class Entrance:
    """The first stage of the pipeline of a program, which is closed when the block of the pipeline has ended."""

    is_closed: bool = False

    async def __call__(self, source: AsyncIterator[CreateResponse]) -> AsyncGenerator[CreateResponse, None]:
        """Pass on the request of a program; raise `TypeError` for another frame, and `ValueError` unless it is one.

        Raise `RuntimeError` if the pipeline is closed.
        """
        if self.is_closed:
            raise RuntimeError("the pipeline is closed: open it inside its block, async with pipeline(settings) as ...")
        given: list[CreateResponse] = []
        async for request in source:
            if not isinstance(request, CreateResponse):
                raise TypeError(f"a response is made of a CreateResponse, not of a {type(request).__name__}")
            if given:
                raise ValueError("the source gives more than one request: open the pipeline once for each")
            given.append(request)
        if not given:
            raise ValueError("the source gives no request: open the pipeline with source_of([request])")
        yield given[0]


async def collect(events: AsyncIterator[ResponseEvent]) -> Response:
    """Return the response that a stream of events ends with; its ``output_text`` is the text of the answer."""
    return await last_response(events)


async def application(settings: Settings, start_engine: EngineStarter = start) -> web.Application:
    """Start everything, and return the aiohttp application, to serve by itself or to mount under a prefix.

    Running responses get ``drain_timeout`` when the application shuts down, and its cleanup ends the engine.
    """
    async with AsyncExitStack() as started:
        server = await started.enter_async_context(running(settings, start_engine, settings.peer_url))
        port_of_metrics = started.enter_context(bound_for_metrics(settings.host, settings.metrics_port))
        await started.enter_async_context(serving_metrics(server.api.sampler, port_of_metrics))
        closing = started.pop_all()
    app = server.api.app(settings.max_body_bytes)
    app.on_shutdown.insert(0, lambda _: server.scheduler.drain(settings.drain_timeout))  # before sockets are closed
    app.on_cleanup.append(lambda _: closing.aclose())
    return app
