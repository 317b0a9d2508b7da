"""The composition root: settings -> engine, store and tools -> pipeline -> HTTP server, and ``penstock serve``.

`application` and `pipeline` give other programs the same parts: see ``api/EMBEDDING.md``.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from socket import socket
from typing import NoReturn
from uuid import uuid4

import uvloop
from aiohttp import web
from pydantic_settings import SettingsError

from penstock.api.app import Api
from penstock.api.assembly import (
    RunningEngine,
    admitting,
    assembled,
    database,
    mcp_servers,
    recording_of,
    rehearsed,
    toolbox,
)
from penstock.api.backends import EngineStarter, loading, over_http, planned, reason_to_wait, start, start_shown
from penstock.api.cli.check import all_pass
from penstock.api.cli.checks import Checks
from penstock.api.cli.mistakes import explained
from penstock.api.cli.serve import greeting, read_settings
from penstock.api.frontends.frontend import Frontend
from penstock.api.frontends.link import Failed, Link, Up
from penstock.api.frontends.seat import Seat
from penstock.api.frontends.supervisor import Supervisor
from penstock.api.http.auth import Keys
from penstock.api.http.connections import bind, listen, serving
from penstock.api.http.origins import Origins
from penstock.api.http.starting import answering
from penstock.api.key_sources import seal_keys
from penstock.api.limits.admission import Admission
from penstock.api.metrics.scrape import serving_metrics
from penstock.api.peers import Membership, Peers
from penstock.api.runs.housekeeping import keep_sweeping, keep_tidying, tune_gc
from penstock.api.runs.scheduler import Scheduler
from penstock.api.runs.watchdog import watching
from penstock.api.settings import DEFAULT_MODEL, NO_STORE, Settings
from penstock.api.share import ALONE, Share
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import CannotRun, CannotStart, StageError
from penstock.pipeline.logs import counted, log_to_stderr
from penstock.pipeline.plugins import WrongPlugin, load
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.recordings.recorder import make_folder
from penstock.stages.recordings.converse import partly_run, recorded_example
from penstock.stages.services import tracing
from penstock.stages.services.engines.scripted import ScriptedEngine
from penstock.stages.services.runs.run import RunRegistry
from penstock.stages.services.sealing import Sealer
from penstock.stages.services.store.store import Store

logger = logging.getLogger("penstock")

UNSTARTABLE = (OSError, SettingsError, StageError, CannotStart, WrongPlugin)
"""Errors that the operator can fix: they end the command with their message, without a traceback."""

CHECK_WAIT = 3.0
"""Seconds to wait for an engine elsewhere, to check the settings."""


@asynccontextmanager
async def open_scheduler(
    settings: Settings, keys: Keys, start_engine: EngineStarter = start, share: Share = ALONE
) -> AsyncGenerator[Scheduler, None]:
    """Run everything but HTTP for the length of a block: the store, the engine, the tools and the pipeline.

    ``share`` is the part of this process, if it is one of several frontends.
    """
    async with AsyncExitStack() as closing:
        if settings.record:
            make_folder(settings.record)
        place = str(share.counts or settings.store)
        store = Store(database(place), settings.stale, keeps=settings.store != NO_STORE)
        closing.push_async_callback(store.close)
        await store.open()
        await keys.read_store(store.keys)
        closing.callback(asyncio.create_task(keys.follow_store(store.keys, settings.heartbeat)).cancel)
        exporter = tracing.wanted_exporter()
        backend = await closing.enter_async_context(start_engine(settings))
        await closing.enter_async_context(tracing.exporting(exporter))  # ends first: the responses have ended by then
        runs = RunRegistry(store, measures_keys=settings.metrics_by_key)
        sealer = Sealer(seal_keys(settings.seal_key_file, settings.seal_keys) or [await store.secret("seal")])
        admission = Admission(settings.limits, name_of=keys.limits)
        if place != NO_STORE:
            admission.allowances, admission.holds = store.allowances, store.places
        closing.callback(admission.close)
        tools = backend.toolbox or await toolbox(settings, keys, admission.sandbox)
        closing.push_async_callback(tools.close)
        if recording := recording_of(settings, backend):
            closing.push_async_callback(recording.close)
        yield Scheduler(
            admitting(
                assembled(settings, backend, runs, tools, sealer, recording), settings, backend, admission.of, share
            ),
            backend.engine,
            runs,
            store,
            limit=share.of(settings.max_background),
            detaches=settings.detach,
            restarts=settings.resume_interrupted,
            admission=admission,
        )


@asynccontextmanager
async def join_servers(
    settings: Settings, keys: Keys, scheduler: Scheduler, url: str, siblings: Sequence[str] = ()
) -> AsyncGenerator[Api, None]:
    """Join the servers of the store for the length of a block; they reach this one at ``url``.

    ``siblings`` are the URLs of the other frontends of this server.
    """
    recovery, store = scheduler.recovery, scheduler.store
    origins = Origins(settings.called(url), settings.allow_origin, keyed=keys.are_needed)
    async with Membership(
        store.servers, url, recovery.recover, scheduler.release_lost, settings.heartbeat, settings.stale
    ):
        housekeeping = (
            asyncio.create_task(keep_sweeping(store, settings.store_ttl, settings.stream_ttl)),
            asyncio.create_task(keep_tidying(scheduler.admission)),
        )
        try:
            models = scheduler.engine.models
            yield Api(
                scheduler,
                models,
                settings.keep_alive,
                keys,
                Peers(siblings=siblings),
                recorded_if=settings.recorded_if,
                origins=origins,
                serves_metrics=settings.metrics_port is None,
                metrics_key=settings.metrics_key.get_secret_value() if settings.metrics_key else "",
            )
        finally:
            for task in housekeeping:
                task.cancel()


@asynccontextmanager
async def pipeline(
    settings: Settings, start_engine: EngineStarter = start
) -> AsyncGenerator[Pipeline[CreateResponse, ResponseEvent], None]:
    """Run the pipeline of these settings without HTTP, for the length of a block."""
    keys = _preloaded(settings)
    async with (
        open_scheduler(settings, keys, start_engine) as scheduler,
        join_servers(settings, keys, scheduler, _unreachable()),
    ):
        with watching(scheduler.pipeline, settings.slow_callback):
            yield scheduler.pipeline


async def application(settings: Settings, start_engine: EngineStarter = start) -> web.Application:
    """Start everything, and return the aiohttp application, to serve by itself or to mount under a prefix.

    Running responses get ``drain_timeout`` when the application shuts down, and its cleanup ends the engine.
    """
    keys = _preloaded(settings)
    async with AsyncExitStack() as started:
        scheduler = await started.enter_async_context(open_scheduler(settings, keys, start_engine))
        url = settings.peer_url or _unreachable()
        api = await started.enter_async_context(join_servers(settings, keys, scheduler, url))
        started.enter_context(watching(scheduler.pipeline, settings.slow_callback))
        port_of_metrics = started.enter_context(_bound_for_metrics(settings))
        await started.enter_async_context(serving_metrics(api.sampler, port_of_metrics))
        closing = started.pop_all()
    app = api.app(settings.max_body_bytes)
    app.on_shutdown.insert(0, lambda _: scheduler.drain(settings.drain_timeout))  # before sockets are closed
    app.on_cleanup.append(lambda _: closing.aclose())
    return app


async def serve(settings: Settings, start_engine: EngineStarter = start) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends the responses that still run.

    Until the engine runs, requests are answered with status 503, and ``/ready`` says what the server waits for.
    """
    keys = _preloaded(settings)
    async with AsyncExitStack() as closing:
        bound = closing.enter_context(bind(settings.host, settings.port))
        listen(bound)  # the address is ours alone before the other servers of the store learn it
        with answering(bound, reason_to_wait(settings)):
            scheduler = await closing.enter_async_context(open_scheduler(settings, keys, start_engine))
        port = bound.getsockname()[1]
        url = settings.reached_at(port)
        api = await closing.enter_async_context(join_servers(settings, keys, scheduler, url))
        await closing.enter_async_context(serving(api.app(settings.max_body_bytes), bound))
        port_of_metrics = closing.enter_context(_bound_for_metrics(settings))
        await closing.enter_async_context(serving_metrics(api.sampler, port_of_metrics))
        tune_gc()
        closing.enter_context(watching(scheduler.pipeline, settings.slow_callback))
        print(greeting(settings, port, api.models, recorded_example(scheduler.pipeline)), flush=True)
        stop, hurry = _stop_signals()
        _obey_signals(keys, scheduler)
        await stop.wait()
        await _drained(settings, scheduler, hurry)


def _bound_for_metrics(settings: Settings) -> AbstractContextManager[socket | None]:
    """Bind the port of the metrics, if they have one of their own."""
    return nullcontext() if settings.metrics_port is None else bind(settings.host, settings.metrics_port)


def _obey_signals(keys: Keys, scheduler: Scheduler) -> None:
    """Have signals read files again, and switch the level of the log."""
    _switch_level_at_sigusr1()
    _read_again_at_sighup({"API keys": keys.read, "limits": scheduler.admission.read})


async def _drained(settings: Settings, scheduler: Scheduler, hurry: asyncio.Event) -> None:
    """Wait until the responses have ended, their time is over, or a second signal has come."""
    if running_now := scheduler.in_flight.count:
        number = counted(running_now, "running response")
        text = "Stopping: waiting up to %g s for %s; a second signal, such as Ctrl-C, ends the wait"
        logger.info(text, settings.drain_timeout, number)
    await scheduler.drain(settings.drain_timeout, hurry.is_set)


# Frontends


def serve_frontends(settings: Settings) -> None:
    """Serve with several processes until SIGTERM or SIGINT; call it in the main thread."""
    _preloaded(settings)
    with ExitStack() as closing:
        bound = closing.enter_context(bind(settings.host, settings.port))
        listen(bound)
        supervisor = Supervisor(settings, settings.frontends, run_frontend, bound)
        closing.enter_context(supervisor.prepared())
        is_ours = not settings.engine
        shown = closing.enter_context(loading(settings)) if is_ours else None
        with answering(bound, reason_to_wait(settings)):
            if is_ours:
                plan, model = planned(settings, process=-1)
                rehearsed(settings, RunningEngine(ScriptedEngine(), model))
                closing.enter_context(supervisor.launched(plan))
            else:
                supervisor.start_all()
            up = supervisor.wait()
        if shown:
            shown.finish()
        print(greeting(settings, bound.getsockname()[1], up.models, up.example), flush=True)
        uvloop.run(supervisor.run())


def run_frontend(seat: Seat) -> None:
    """Run one frontend; the supervisor starts a process with this function."""
    seat.take()
    log_to_stderr(seat.settings.log_level, as_json=seat.settings.log_format == "json")
    try:
        uvloop.run(_serve_seat(Frontend(seat)))
    except UNSTARTABLE as error:
        Link(seat.link).send(Failed(str(error)))
        sys.exit(1)


async def _serve_seat(frontend: Frontend) -> None:
    seat = frontend.seat
    settings = seat.settings
    keys = _preloaded(settings)
    async with AsyncExitStack() as closing:
        opening = open_scheduler(settings, keys, frontend.start_engine, seat.share)
        scheduler = await closing.enter_async_context(opening)
        joining = join_servers(settings, keys, scheduler, seat.url, seat.siblings)
        api = await closing.enter_async_context(joining)
        runner = await closing.enter_async_context(serving(api.app(settings.max_body_bytes), seat.listening))
        await closing.enter_async_context(serving_metrics(api.sampler, seat.metrics))
        tune_gc()
        closing.enter_context(watching(scheduler.pipeline, settings.slow_callback))
        await closing.enter_async_context(frontend.attached(runner, scheduler))
        _obey_signals(keys, scheduler)
        frontend.link.send(Up(api.models, recorded_example(scheduler.pipeline), tuple(frontend.greetings)))
        await frontend.stop.wait()
        await _drained(settings, scheduler, frontend.hurry)


def _keys(settings: Settings) -> Keys:
    return Keys(settings.api_key_file, settings.api_keys, reads_store=settings.store_keys)


def _preloaded(settings: Settings) -> Keys:
    """Return the keys; wrong ones, plug-ins and MCP servers end the start before the model is loaded."""
    tracing.is_wanted()
    load(settings.with_)
    seal_keys(settings.seal_key_file, settings.seal_keys)
    mcp_servers(settings)
    Admission(settings.limits)
    return _keys(settings)


def _unreachable() -> str:
    """Return a name for a server that has no URL of its own; a name in use would declare its server dead."""
    return f"process:{uuid4()}"


def _stop_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Return an event that the first SIGTERM or SIGINT sets, and one that the second sets."""
    first, second = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return first, second


def _read_again_at_sighup(reads: Mapping[str, Callable[[], None]]) -> None:
    """Have SIGHUP read files again, each by its name; if one of them is wrong, what was read before stays in effect."""

    def read_again() -> None:
        for name, read in reads.items():
            try:
                read()
            except CannotStart as error:
                logger.error("SIGHUP: the %s stay as they were: %s", name, error)  # noqa: TRY400 - the error says all
            else:
                logger.info("SIGHUP: the %s were read again", name)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, read_again)


def _switch_level_at_sigusr1() -> None:
    """Have SIGUSR1 switch the log of penstock to DEBUG, and back."""
    ours = logging.getLogger("penstock")

    def switch() -> None:
        ours.setLevel(logging.NOTSET if ours.level == logging.DEBUG else logging.DEBUG)
        logger.warning("SIGUSR1: the level of the log is %s", logging.getLevelName(ours.getEffectiveLevel()))

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, switch)


async def drawn(settings: Settings) -> str:
    """Describe what would serve the model, for ``--print-pipeline``, without starting a model."""
    if not settings.engine:
        with loading(settings):
            model = planned(settings)[1]
        return _drawn(settings, RunningEngine(ScriptedEngine(), model), "vLLM in this process")
    own = settings.recordings or settings.engine_factory
    async with start(settings) if own else over_http(settings, wait=CHECK_WAIT) as running:
        at = "" if own else "vLLM at "
        return _drawn(settings, running, f"{at}{' and '.join(settings.engine)}")


def _drawn(settings: Settings, running: RunningEngine, engine: str) -> str:
    model = settings.model or (running.engine.models[0] if settings.engine else DEFAULT_MODEL)
    place = "" if settings.recordings else f", and runs on {engine}"
    pipeline = rehearsed(settings, running)
    return f"{model} {running.model.description}{place}.\n\n{pipeline.drawn(partly_run(pipeline))}"


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise SystemExit for a signal, which unwinds the start, until the server handles the signals itself."""
    handlers = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _exit(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def main(arguments: Sequence[str]) -> None:
    """Run ``penstock serve`` with the ``arguments`` that follow it."""
    try:
        settings = read_settings(arguments)
        log_to_stderr(settings.log_level, as_json=settings.log_format == "json")
        with _signals_raised():
            if settings.print_pipeline:
                _preloaded(settings)
                print(uvloop.run(drawn(settings)))
            elif settings.frontends > 1:
                serve_frontends(settings)
            else:
                uvloop.run(serve(settings, start_shown))
    except UNSTARTABLE as error:
        cause = f"penstock: {explained(error, arguments)}"
    else:
        return
    gc.collect()  # objects of vLLM complain when they end: not after the last line
    sys.exit(cause)


def check(arguments: Sequence[str]) -> None:
    """Run ``penstock check`` with the ``arguments`` that follow it, which are those of ``penstock serve``."""
    settings = read_settings(arguments, "check")
    log_to_stderr(settings.log_level)
    sys.exit(not uvloop.run(all_pass(Checks(settings, drawn).all, (*UNSTARTABLE, CannotRun), arguments)))
