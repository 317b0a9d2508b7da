"""The server: its settings, store, tools, engine, pipeline and runs, the routes of its application, and its end.

`penstock serve`, each of its frontends, and programs that embed penstock begin here.  ``docs/EMBEDDING.md`` describes
`application` and `pipeline`, which are for programs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext

from aiohttp import web

from penstock.api.app import Api
from penstock.api.dialects.responses.form import last_response
from penstock.api.http.origins import Origins
from penstock.api.http.proxies import Proxies
from penstock.api.metrics.scrape import bound_for_metrics, serving_metrics
from penstock.api.peers import Peers
from penstock.api.resources.resources import ServerParts, opened
from penstock.api.runs.scheduler import Scheduler
from penstock.api.runs.watchdog import watching
from penstock.api.settings import Settings
from penstock.api.start.assembly import RunningEngine, admitting, aliases_of, assembled, recording_of
from penstock.api.start.backends import EngineStarter, start
from penstock.api.start.entrance import Entrance
from penstock.api.start.parts import (
    Preloaded,
    Running,
    delivering,
    joined,
    opened_store,
    opened_tools,
    preloaded,
    sealer_of,
    unreachable,
)
from penstock.api.start.share import ALONE, Share
from penstock.pipeline.core import Pipeline, Step
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.response import Response
from penstock.services import tracing
from penstock.services.runs.run import RunRegistry
from penstock.services.tools import Toolbox


@asynccontextmanager
async def running(
    settings: Settings,
    start_engine: EngineStarter = start,
    url: str | None = None,
    siblings: Sequence[str] = (),
    share: Share = ALONE,
    while_starting: AbstractContextManager[None] | None = None,
) -> AsyncGenerator[Running, None]:
    """Run everything but HTTP for the length of a block.

    The other servers of the store reach this one at ``url``, and the other frontends of this server at ``siblings``.
    ``share`` is the part of this process, if it is one of several frontends.  The block ``while_starting`` lasts until
    the engine and the tools run.
    """
    loaded, peers, place = preloaded(settings), Peers(siblings=siblings), url or unreachable()
    async with AsyncExitStack() as closing:
        with while_starting or nullcontext():
            scheduler, tools, backend = await closing.enter_async_context(
                _scheduler(settings, loaded, start_engine, share)
            )
        await closing.enter_async_context(joined(settings, scheduler, place))
        await closing.enter_async_context(delivering(settings, scheduler.store, loaded.keys))
        parts = ServerParts(
            settings,
            scheduler=scheduler,
            tools=tools,
            peers=peers,
            prompts=loaded.prompts,
            keys=loaded.keys,
            dialects=loaded.dialects,
        )
        resources = await closing.enter_async_context(opened(parts))
        closing.enter_context(watching(scheduler.pipeline, settings.slow_callback))
        api = Api(
            scheduler,
            settings.keep_alive,
            loaded.keys,
            peers,
            recorded_if=settings.recorded_if,
            origins=Origins(settings.names_at(place), settings.allow_origin, keyed=loaded.keys.are_needed),
            serves_metrics=settings.metrics_port is None,
            metrics_key=settings.metrics_key.get_secret_value() if settings.metrics_key else "",
            dialects=loaded.dialects,
            resources=resources,
            proxies=Proxies.parse(settings.trusted_proxy, settings.forwarded_header),
        )
        yield Running(
            loaded.keys,
            prompts=loaded.prompts,
            scheduler=scheduler,
            api=api,
            take_models=backend.take,
            at_sighup=parts.at_sighup,
        )


@asynccontextmanager
async def _scheduler(
    settings: Settings, loaded: Preloaded, start_engine: EngineStarter, share: Share
) -> AsyncGenerator[tuple[Scheduler, Toolbox, RunningEngine], None]:
    """Run the store, the tools, the engine and the pipeline for the length of a block."""
    async with AsyncExitStack() as closing:
        store = await closing.enter_async_context(opened_store(settings, loaded, str(share.counts or settings.store)))
        exporter = tracing.wanted_exporter()
        tools = await closing.enter_async_context(opened_tools(settings, loaded, store))
        started = await closing.enter_async_context(start_engine(settings))
        backend = started.under(loaded.keys)
        await closing.enter_async_context(tracing.exporting(exporter))  # ends first: the responses have ended by then
        runs = RunRegistry(store, measures_keys=settings.metrics_by_key)
        tools, sealer = backend.toolbox or tools, await sealer_of(settings, store)
        pipeline = await closing.enter_async_context(assembled(settings, backend, runs, tools, sealer, loaded.prompts))
        recording = recording_of(settings, backend)
        if recording:
            closing.push_async_callback(recording.close)
            pipeline = recording.tapped(pipeline)
        scheduler = Scheduler(
            admitting(pipeline, settings, backend, loaded.admission.of, share),
            backend.engine,
            runs,
            store,
            limit=share.of(settings.max_background),
            detaches=settings.detach,
            restarts=settings.resume_interrupted,
            unserved_after=settings.unserved_after,
            admission=loaded.admission,
            allowed=backend.allowed,
            aliases=aliases_of(settings, backend),
            traits_of=backend.model.traits_of,
            sees_images=lambda name: backend.model.of(name).traits.sees_images,
            tools_of=tools.usable,
        )
        if recording:
            scheduler.closing = recording.closing
        yield scheduler, tools, backend


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


@asynccontextmanager
async def pipeline(
    settings: Settings, start_engine: EngineStarter = start
) -> AsyncGenerator[Pipeline[CreateResponse, ResponseEvent], None]:
    """Run the pipeline of these settings without HTTP, for the length of a block.  Its source gives one request."""
    entrance = Entrance()
    async with running(settings, start_engine) as server:
        try:
            yield Pipeline((Step("request", entrance), *server.scheduler.pipeline.steps))
        finally:
            entrance.is_closed = True


async def collect(events: AsyncIterator[ResponseEvent]) -> Response:
    """Return the response that a stream of events ends with; its ``output_text`` is the text of the answer."""
    return await last_response(events)
