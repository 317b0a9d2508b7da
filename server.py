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
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TypeAlias
from uuid import uuid4

import uvloop
from aiohttp import web
from pydantic_settings import SettingsError

from penstock.api.app import Api
from penstock.api.cli.check import Check, all_pass, without_password
from penstock.api.cli.loading import Loading
from penstock.api.cli.mistakes import placed, wrong_option
from penstock.api.cli.serve import greeting, read_settings
from penstock.api.http.auth import Keys, load_keys
from penstock.api.http.connections import bind, listen, serving
from penstock.api.http.origins import Origins
from penstock.api.peers import Membership
from penstock.api.runs.housekeeping import keep_sweeping, tune_gc
from penstock.api.runs.recording import recorder
from penstock.api.runs.scheduler import Scheduler
from penstock.api.runs.watchdog import watching
from penstock.api.settings import DEFAULT_MODEL, NO_STORE, Settings
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import CannotRun, CannotStart, StageError
from penstock.pipeline.logs import counted, log_to_stderr
from penstock.pipeline.plugins import WrongPlugin, load
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.recordings.recorder import Recorder, make_folder
from penstock.stages.converse.tool_loop import Limits
from penstock.stages.models.chat.load import ChatOptions, load_chat_model, read_config
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.normalize.normalize import CacheSharing
from penstock.stages.normalize.tool_types import named
from penstock.stages.optional.log import LogOutputs, LogPrompts
from penstock.stages.recordings.converse import RecordedTools, partly_run
from penstock.stages.recordings.recordings import read_recordings
from penstock.stages.render.harmony.grammar import WARM_UP
from penstock.stages.responses import (
    NO_DEFAULTS,
    ModelStages,
    chat_stages,
    harmony_stages,
    recorded_stages,
    responses_pipeline,
    text_stages,
)
from penstock.stages.services.engines.custom import guarded_engine, open_engine
from penstock.stages.services.engines.engine import Engine, TextBackend
from penstock.stages.services.engines.scripted import ScriptedEngine
from penstock.stages.services.engines.vllm import (
    ANYTHING,
    VllmPlan,
    WrongOption,
    default_sampling,
    plan_vllm,
    speaks_harmony,
)
from penstock.stages.services.engines.vllm_http import start_vllm_http
from penstock.stages.services.mcp.config import ServerConfig, read_servers
from penstock.stages.services.runs.run import RunRegistry
from penstock.stages.services.store.database import Database, Nowhere
from penstock.stages.services.store.postgres import PostgresDatabase
from penstock.stages.services.store.sqlite import SqliteDatabase
from penstock.stages.services.store.store import Store
from penstock.stages.services.toolbox import open_toolbox
from penstock.stages.services.tools import FULL_ACCESS, ToolAccess, Toolbox
from penstock.stages.services.web.image_cache import ImageCache
from penstock.stages.services.web.ssrf import AllowedNetworks

logger = logging.getLogger("penstock")

UNSTARTABLE = (OSError, SettingsError, StageError, CannotStart, WrongPlugin)
"""Errors that the operator can fix: they end the command with their message, without a traceback."""

ENGINE_WAIT, CHECK_WAIT = 600.0, 3.0
"""Seconds to wait for an engine elsewhere: to serve, and to check the settings."""


@dataclass(frozen=True)
class RunningEngine:
    """A running engine, the stages for its model, and tools that replace those of the settings, if given."""

    engine: Engine | TextBackend
    model: ModelStages
    toolbox: Toolbox | None = None


EngineStarter: TypeAlias = Callable[[Settings], AbstractAsyncContextManager[RunningEngine]]
"""A function that starts the engine of the settings for the length of a block."""


def start(settings: Settings) -> AbstractAsyncContextManager[RunningEngine]:
    """Start the engine that the settings name, for the length of a block."""
    if settings.recordings:
        return from_recordings(settings, settings.recordings)
    if settings.engine_factory:
        return of_operator(settings, settings.engine_factory)
    return over_http(settings) if settings.engine else in_this_process(settings)


@asynccontextmanager
async def start_and_show(settings: Settings) -> AsyncGenerator[RunningEngine, None]:
    """Start the engine, and show on the terminal how far a model in this process is loaded."""
    async with AsyncExitStack() as closing:
        shown = None if settings.engine else closing.enter_context(loading(settings))
        running = await closing.enter_async_context(start(settings))
        if shown:
            shown.finish()
        yield running


def loading(settings: Settings) -> Loading:
    """Return the block in which the model of the settings is loaded, for a command."""
    return Loading(settings.model or DEFAULT_MODEL, is_verbose=settings.verbose or settings.log_level == "DEBUG")


@asynccontextmanager
async def in_this_process(settings: Settings) -> AsyncGenerator[RunningEngine, None]:
    """Run vLLM in this process; its workers are child processes."""
    plan, model = planned(settings)
    rehearsed(settings, RunningEngine(ScriptedEngine(), model))
    engine = plan.start()
    try:
        await engine.warm_up(WARM_UP if model.encoding == "harmony" else ANYTHING)
        yield RunningEngine(engine, model)
    finally:
        await engine.close()


def planned(settings: Settings) -> tuple[VllmPlan, ModelStages]:
    """Return vLLM's plan for an engine in this process, and the stages for its model."""
    try:
        plan = plan_vllm(settings.model or DEFAULT_MODEL, settings.engine_options)
    except WrongOption as error:
        raise CannotStart(wrong_option(error, settings.engine_arguments)) from error
    chat = None if plan.speaks_harmony else load_chat_model(plan.config, settings.chat)
    return plan, stages(settings, chat, default_sampling(plan.config))


@asynccontextmanager
async def over_http(settings: Settings, wait: float = ENGINE_WAIT) -> AsyncGenerator[RunningEngine, None]:
    """Generate on vLLM servers over HTTP.

    The template, tokenizer and parsers of a chat model are still loaded here; only its weights are elsewhere.  The
    servers do not always reveal that a model speaks Harmony, so the config of the model decides.
    """
    key = settings.engine_key.get_secret_value() if settings.engine_key else None
    engine = await start_vllm_http(settings.engine, api_key=key, wait=wait)
    try:
        model = None if engine.speaks_harmony else settings.model or engine.root
        yield RunningEngine(engine, stages_elsewhere(settings, model))
    finally:
        await engine.close()


@asynccontextmanager
async def of_operator(settings: Settings, factory: str) -> AsyncGenerator[RunningEngine, None]:
    """Run an engine of the operator's own; it speaks Harmony, unless the config of MODEL says otherwise."""
    async with open_engine(factory, settings) as engine:
        is_text = isinstance(engine, TextBackend)
        yield RunningEngine(engine, text_stages() if is_text else stages_elsewhere(settings, settings.model))


def stages_elsewhere(settings: Settings, model: str | None) -> ModelStages:
    """Return the stages for the ``model`` of an engine elsewhere by its config, or for Harmony if it is None."""
    config = read_config(model) if model else None
    chat = None if config is None or speaks_harmony(config) else load_chat_model(config, settings.chat)
    return stages(settings, chat, default_sampling(config) if config else NO_DEFAULTS)


@asynccontextmanager
async def from_recordings(settings: Settings, folder: Path) -> AsyncGenerator[RunningEngine, None]:
    """Answer from recordings, without a model; MODEL, if given, is one more name under which they answer."""
    recordings = read_recordings(folder)
    models = tuple(dict.fromkeys(filter(None, (settings.model, *recordings.models))))
    if texts := recordings.texts:
        some = ", ".join(repr(shortened(text, 60)) for text in texts[:3])
        logger.info(
            "Recorded inputs without tools: %s%s", some, f" and {rest} more" if (rest := len(texts[3:])) else ""
        )
    engine = ScriptedEngine(context_length=2**31 - 1, models=models)
    model = recorded_stages(load_encoding(), recordings, settings.replay_speed)
    yield RunningEngine(engine, model, RecordedTools(recordings=recordings))


def stages(settings: Settings, chat: ChatModel | None, sampling: Mapping[str, float] = NO_DEFAULTS) -> ModelStages:
    """Return the stages for a chat model, or for Harmony if it is None, with the defaults of ``sampling``."""
    if chat:
        if settings.harmony_system_instructions:
            logger.warning("The model has a chat template, which decides where instructions stand")
        return chat_stages(chat, ImageCache(AllowedNetworks.parse(settings.allow_address)), sampling)
    if settings.chat != ChatOptions():
        logger.warning("The model speaks Harmony: parsers and templates are for others")
    return harmony_stages(load_encoding(), sampling, system_instructions=settings.harmony_system_instructions)


def mcp_servers(settings: Settings) -> dict[str, ServerConfig]:
    """Return the MCP servers of the operator, by label."""
    return read_servers(settings.mcp_config) if settings.mcp_config else {}


async def toolbox(settings: Settings, keys: Keys) -> Toolbox:
    """Return the tools that the server runs for the model, and the clients that may use them."""
    allowed = AllowedNetworks.parse(settings.allow_address)
    key = settings.web_search_key.get_secret_value() if settings.web_search_key else ""
    tools = await open_toolbox(allowed, mcp_servers(settings), settings.web_search, key, sandbox=settings.sandbox)
    of_all = named(settings.allow_tool) if settings.allow_tool else FULL_ACCESS.of_all
    return replace(tools, access=ToolAccess(of_all, keys.tools))


def database(store: str) -> Database:
    """Return the database of the setting ``store``: PostgreSQL by its URL, or SQLite by the path of its file."""
    if store == NO_STORE:
        return Nowhere()
    if store.startswith(("postgresql://", "postgres://")):
        return PostgresDatabase(store)
    return SqliteDatabase(store)


def assembled(
    settings: Settings, running: RunningEngine, runs: RunRegistry, tools: Toolbox, recording: Recorder | None = None
) -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the pipeline of these settings, with all stages that the operator inserts."""
    limits = Limits(call_seconds=settings.tool_timeout, turns=settings.max_turns)
    caches = CacheSharing(settings.share_caches, settings.salt_caches)
    pipeline = declared = responses_pipeline(running.model, running.engine, runs, tools, limits, caches)
    if settings.engine_factory:
        pipeline = guarded_engine(running.engine, pipeline)
    if settings.log_prompts:
        if "render" not in pipeline.names():
            raise CannotStart("--log-prompts: there is no stage render here, which makes prompts")
        decode = running.model.decode
        pipeline = pipeline.insert_after("render", "log prompts", LogPrompts(decode, settings.max_log_len))
    if settings.log_outputs:
        pipeline = pipeline.insert_after("emit", "log outputs", LogOutputs(settings.max_log_len))
    pipeline = load(settings.with_)(pipeline)
    for name, when in partly_run(pipeline).items():
        if name not in declared.names() or pipeline.stage(name) is not declared.stage(name):
            elsewhere = "It runs with a model, and in penstock replay --from render"
            logger.warning(
                "The stage %r %s: answers that were recorded after it do not pass it. %s", name, when, elsewhere
            )
    return recording.tapped(pipeline) if recording else pipeline


def rehearsed(settings: Settings, running: RunningEngine) -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the pipeline of these settings without a store or tools, to draw it or to find misplaced stages early."""
    return assembled(settings, running, RunRegistry(Store(Nowhere())), running.toolbox or Toolbox())


def recording_of(settings: Settings, running: RunningEngine) -> Recorder | None:
    """Return the recorder of ``--record``, or None without that option."""
    if settings.record is None:
        return None
    root = getattr(running.engine, "root", None if settings.engine else DEFAULT_MODEL)
    source = None if settings.recordings else settings.model or root
    return recorder(settings, settings.record, source, running.model.encoding)


@asynccontextmanager
async def open_scheduler(
    settings: Settings, keys: Keys, start_engine: EngineStarter = start
) -> AsyncGenerator[Scheduler, None]:
    """Run everything but HTTP for the length of a block: the store, the engine, the tools and the pipeline."""
    async with AsyncExitStack() as closing:
        if settings.record:
            make_folder(settings.record)
        store = Store(database(settings.store), settings.stale, keeps=settings.store != NO_STORE)
        closing.push_async_callback(store.close)
        await store.open()
        backend = await closing.enter_async_context(start_engine(settings))
        runs = RunRegistry(store)
        tools = backend.toolbox or await toolbox(settings, keys)
        closing.push_async_callback(tools.close)
        if recording := recording_of(settings, backend):
            closing.push_async_callback(recording.close)
        yield Scheduler(
            assembled(settings, backend, runs, tools, recording),
            backend.engine,
            runs,
            store,
            limit=settings.max_background,
            detaches=settings.detach,
            restarts=settings.resume_interrupted,
        )


@asynccontextmanager
async def join_servers(settings: Settings, keys: Keys, scheduler: Scheduler, url: str) -> AsyncGenerator[Api, None]:
    """Join the servers of the store for the length of a block; they reach this one at ``url``."""
    recovery, store = scheduler.recovery, scheduler.store
    origins = Origins(settings.called(url), settings.allow_origin, keyed=keys.are_needed)
    async with Membership(
        store.servers, url, recovery.recover, scheduler.release_lost, settings.heartbeat, settings.stale
    ):
        sweeping = asyncio.create_task(keep_sweeping(store, settings.store_ttl, settings.stream_ttl))
        try:
            models = scheduler.engine.models
            yield Api(scheduler, models, settings.keep_alive, keys, recorded_if=settings.recorded_if, origins=origins)
        finally:
            sweeping.cancel()


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
        closing = started.pop_all()
    app = api.app(settings.max_body_bytes)
    app.on_shutdown.append(lambda _: scheduler.drain(settings.drain_timeout))
    app.on_cleanup.append(lambda _: closing.aclose())
    return app


async def serve(settings: Settings, start_engine: EngineStarter = start) -> None:
    """Serve until SIGTERM or SIGINT."""
    keys = _preloaded(settings)
    async with AsyncExitStack() as closing:
        bound = closing.enter_context(bind(settings.host, settings.port))
        scheduler = await closing.enter_async_context(open_scheduler(settings, keys, start_engine))
        listen(bound)  # the address is ours alone before the other servers of the store learn it
        url = settings.reached_at(bound.getsockname()[1])
        api = await closing.enter_async_context(join_servers(settings, keys, scheduler, url))
        await closing.enter_async_context(serving(api.app(settings.max_body_bytes), bound))
        tune_gc()
        closing.enter_context(watching(scheduler.pipeline, settings.slow_callback))
        print(greeting(settings, api.models), flush=True)
        await _signal_to_stop()
        if running_now := scheduler.in_flight.count:
            number = counted(running_now, "running response")
            logger.info("Stopping: waiting up to %g s for %s", settings.drain_timeout, number)
        await scheduler.drain(settings.drain_timeout)


def _keys(settings: Settings) -> Keys:
    return load_keys(settings.api_key_file, settings.api_keys)


def _preloaded(settings: Settings) -> Keys:
    """Return the keys; wrong ones, plug-ins and MCP servers end the start before the model is loaded."""
    load(settings.with_)
    mcp_servers(settings)
    return _keys(settings)


def _unreachable() -> str:
    """Return a name for a server that has no URL of its own; a name in use would declare its server dead."""
    return f"process:{uuid4()}"


async def _signal_to_stop() -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()


def checks(settings: Settings) -> dict[str, Check]:
    """Return the checks of ``penstock check``: all that can be wrong before a model is loaded."""

    async def keys() -> str:
        return "needed" if _keys(settings).are_needed else "none: all clients that reach the server may use it"

    async def address() -> str:
        with bind(settings.host, settings.port) as bound:
            return "{} port {} is free".format(*bound.getsockname())

    async def store() -> str:
        checked = Store(database(settings.store))
        try:
            await checked.open()
        finally:
            await checked.close()
        return without_password(settings.store)

    async def mcp() -> str:
        return ", ".join(mcp_servers(settings)) or "no servers"

    async def tools() -> str:
        opened = await toolbox(settings, Keys())
        await opened.close()
        return ", ".join(sorted(opened.kinds)) or "none"

    async def record() -> str:
        if settings.record is None:
            return "nothing"
        make_folder(settings.record)
        return f"into {settings.record}"

    async def pipeline() -> str:
        return await drawn(settings)

    return {check.__name__: check for check in (keys, address, store, mcp, tools, record, pipeline)}


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
        log_to_stderr(settings.log_level)
        with _signals_raised():
            if settings.print_pipeline:
                print(uvloop.run(drawn(settings)))
            else:
                uvloop.run(serve(settings, start_and_show))
    except UNSTARTABLE as error:
        cause = f"penstock: {placed(str(error), arguments)}"
    else:
        return
    gc.collect()  # objects of vLLM complain when they end: not after the last line
    sys.exit(cause)


def check(arguments: Sequence[str]) -> None:
    """Run ``penstock check`` with the ``arguments`` that follow it, which are those of ``penstock serve``."""
    settings = read_settings(arguments, "check")
    log_to_stderr(settings.log_level)
    sys.exit(not uvloop.run(all_pass(checks(settings), (*UNSTARTABLE, CannotRun), arguments)))
