"""The composition root: settings -> engine, store -> pipeline -> HTTP server, and ``penstock serve``."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import uvloop
from aiohttp import web
from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from penstock.api.app import Api
from penstock.api.http.auth import UnusableKeys, load_keys
from penstock.api.peers import Membership
from penstock.api.runs.housekeeping import keep_sweeping, tune_gc
from penstock.api.runs.recording import recorder
from penstock.api.runs.scheduler import Scheduler
from penstock.api.settings import DEFAULT_MODEL, Settings, mistakes
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import CannotRun, StageError
from penstock.pipeline.logs import FORMAT, name_response
from penstock.pipeline.plugins import Install, WrongPlugin, load
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.tools import HOSTED
from penstock.pipeline.recordings.recorder import make_folder
from penstock.stages.converse.exchange import Limits
from penstock.stages.models.chat.load import (
    ChatModelsNeedVllm,
    ChatOptions,
    WrongChatOptions,
    load_chat_model,
    read_config,
)
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.parsers import UnknownParser
from penstock.stages.models.harmony.vocabulary import ClobberedInstall, load_encoding
from penstock.stages.optional.log import log_outputs
from penstock.stages.recordings.converse import answered_from
from penstock.stages.recordings.recordings import Recordings, read_recordings
from penstock.stages.render.harmony.grammar import WARM_UP
from penstock.stages.responses import chat_responses, harmony_responses
from penstock.stages.services.browser.search_engines import search_backend
from penstock.stages.services.browser.session import BrowserHost
from penstock.stages.services.engines.engine import Engine
from penstock.stages.services.engines.scripted import ScriptedEngine
from penstock.stages.services.engines.vllm import ANYTHING, NoVllm, UnknownModel, VllmPlan, plan_vllm, speaks_harmony
from penstock.stages.services.engines.vllm_http import start_vllm_http
from penstock.stages.services.mcp.builtin_tools import McpHost
from penstock.stages.services.mcp.config import WrongServers, read_servers
from penstock.stages.services.mcp.mcp_servers import McpServers
from penstock.stages.services.runs.run import RunRegistry
from penstock.stages.services.sandbox.container import ContainerHost
from penstock.stages.services.sandbox.probe import Sandbox, probe
from penstock.stages.services.sandbox.python import PythonHost
from penstock.stages.services.store.database import Database, Nowhere
from penstock.stages.services.store.postgres import PostgresDatabase
from penstock.stages.services.store.sqlite import SqliteDatabase
from penstock.stages.services.store.store import Store
from penstock.stages.services.tools import Host, Toolbox
from penstock.stages.services.web.image_cache import Images
from penstock.stages.services.web.ssrf import AllowedNetworks

logger = logging.getLogger("penstock")

KEY_PLACES = {
    "--api-key": "--api-key-file or PENSTOCK_API_KEYS",
    "--api-keys": "--api-key-file or PENSTOCK_API_KEYS",
    "--engine-key": "PENSTOCK_ENGINE_KEY",
    "--web-search-key": "PENSTOCK_WEB_SEARCH_KEY",
}
"""Options that would show a key in the process list, each with the right place for the key."""

UNSTARTABLE = (
    OSError,
    SettingsError,
    StageError,
    ChatModelsNeedVllm,
    ClobberedInstall,
    NoVllm,
    UnknownModel,
    UnknownParser,
    UnusableKeys,
    WrongChatOptions,
    WrongPlugin,
    WrongServers,
)
"""Errors that the operator can fix: they end the command with their message, without a traceback."""


@dataclass(frozen=True)
class Started:
    """A running engine.

    ``chat`` is the chat model to render and parse with, or None if the model speaks Harmony.  ``recordings``, if given,
    answer the requests in place of the engine.
    """

    engine: Engine
    chat: ChatModel | None = None
    recordings: Recordings | None = None


Starting: TypeAlias = Callable[[Settings], AbstractAsyncContextManager[Started]]
"""A function that starts the engine of the settings for the length of a block."""


def planned(settings: Settings) -> tuple[VllmPlan, ChatModel | None]:
    """Return vLLM's plan for an engine in this process, and its chat model, or None if the model speaks Harmony."""
    plan = plan_vllm(settings.model or DEFAULT_MODEL, settings.engine_arguments)
    return plan, None if plan.speaks_harmony else load_chat_model(plan.config, settings.chat)


def start(settings: Settings) -> AbstractAsyncContextManager[Started]:
    """Start the engine that the settings name, for the length of a block."""
    if settings.recordings:
        return from_recordings(settings, settings.recordings)
    return over_http(settings) if settings.engine else in_this_process(settings)


@asynccontextmanager
async def in_this_process(settings: Settings) -> AsyncGenerator[Started, None]:
    """Run vLLM in this process; its workers are child processes."""
    plan, chat = planned(settings)
    engine = plan.start()
    try:
        await engine.warm_up(ANYTHING if chat else WARM_UP)
        yield Started(engine, chat)
    finally:
        await engine.close()


@asynccontextmanager
async def over_http(settings: Settings) -> AsyncGenerator[Started, None]:
    """Generate on vLLM servers over HTTP.

    The template, tokenizer and parsers of a chat model are still loaded here; only its weights are elsewhere.
    """
    key = settings.engine_key.get_secret_value() if settings.engine_key else None
    engine = await start_vllm_http(settings.engine, api_key=key)
    try:
        yield Started(engine, None if engine.speaks_harmony else elsewhere(settings, engine.root))
    finally:
        await engine.close()


@asynccontextmanager
async def from_recordings(settings: Settings, folder: Path) -> AsyncGenerator[Started, None]:
    """Answer from recordings, without a model; MODEL, if given, is one more name under which they answer."""
    recordings = read_recordings(folder)
    models = tuple(dict.fromkeys(filter(None, (settings.model, *recordings.models))))
    yield Started(ScriptedEngine(context_length=sys.maxsize, models=models), recordings=recordings)


def elsewhere(settings: Settings, root: str) -> ChatModel | None:
    """Return the chat model of remote engines that serve ``root``, or None if its config shows a gpt-oss.

    The servers do not always reveal that a model speaks Harmony, so the config decides.
    """
    config = read_config(settings.model or root)
    return None if speaks_harmony(config) else load_chat_model(config, settings.chat)


async def serve(
    settings: Settings, started: Callable[[Settings], AbstractAsyncContextManager[Started]] = start
) -> None:
    """Serve until SIGTERM or SIGINT."""
    keys = load_keys(settings.api_key_file, settings.api_keys)
    install = load(settings.with_)
    async with AsyncExitStack() as closing:
        listening = closing.enter_context(_bound(settings.host, settings.port))
        if settings.record:
            make_folder(settings.record)
        store = Store(database(settings.store), settings.stale)
        closing.push_async_callback(store.close)
        await store.open()
        running = await closing.enter_async_context(started(settings))
        engine = running.engine
        runs = RunRegistry(store)
        tools = await toolbox(settings)
        closing.push_async_callback(tools.close)
        pipeline = recorded(settings, running, install(assembled(settings, running, runs, tools)), closing)
        scheduler = Scheduler(
            pipeline,
            engine,
            runs,
            store,
            limit=settings.max_background,
            detaches=settings.detach,
            restarts=settings.resume_interrupted,
        )
        api = Api(scheduler, engine.models, settings.keep_alive, keys, recorded_if=settings.recorded_if)
        url = settings.reached_at(listening.getsockname()[1])
        membership = Membership(
            store.servers, url, scheduler.recovery.recover, scheduler.release_lost, settings.heartbeat, settings.stale
        )
        listening.listen()  # the address is ours alone before the membership announces it
        await closing.enter_async_context(membership)
        runner = web.AppRunner(
            api.app(settings.max_body_bytes),
            handler_cancellation=True,  # off by default: a client that left would keep the engine busy
            shutdown_timeout=1,
            access_log=None,
        )
        await runner.setup()
        closing.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listening).start()
        sweeping = asyncio.create_task(keep_sweeping(store, settings.store_ttl, settings.stream_ttl))
        closing.callback(sweeping.cancel)
        tune_gc()
        print(greeting(settings, engine.models[0]), flush=True)
        await _signal_to_stop()
        logger.info("Stopping: running responses get %g s", settings.drain_timeout)
        await scheduler.drain(settings.drain_timeout)


def recorded(
    settings: Settings,
    running: Started,
    pipeline: Pipeline[CreateResponse, ResponseEvent],
    closing: AsyncExitStack,
) -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the pipeline with a recorder's tap after each recorded stage, or unchanged without ``--record``."""
    if settings.record is None:
        return pipeline
    source = settings.model or str(getattr(running.engine, "root", DEFAULT_MODEL))
    recording = recorder(settings, settings.record, source, "chat" if running.chat else "harmony")
    closing.push_async_callback(recording.close)
    return recording.tapped(pipeline)


def assembled(
    settings: Settings, running: Started, runs: RunRegistry, tools: Toolbox
) -> Pipeline[CreateResponse, ResponseEvent]:
    """Assemble the pipeline for the running engine and the settings."""
    engine, chat = running.engine, running.chat
    if chat is None and settings.chat != ChatOptions():
        logger.warning("The model speaks Harmony: parsers and templates are for others")
    limits = Limits(call_seconds=settings.tool_timeout, turns=settings.max_turns)
    if chat is None:
        pipeline = harmony_responses(engine.models, engine, load_encoding(), runs, tools, limits)
    else:
        images = Images(AllowedNetworks.parse(settings.allow_address))
        pipeline = _with(chat_responses(engine.models, engine, chat, runs, tools, limits), "render", images=images)
    if running.recordings:
        pipeline = answered_from(running.recordings, settings.replay_speed, pipeline)
    if settings.salt_caches:
        pipeline = _with(pipeline, "normalize", salt_caches=True)
    return pipeline.insert_after("emit", "log", log_outputs) if settings.log_outputs else pipeline


def _with(
    pipeline: Pipeline[CreateResponse, ResponseEvent], stage: str, **changes: Any
) -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the pipeline with other fields of a stage, which is a dataclass."""
    return pipeline.replace(stage, replace(pipeline.stage(stage), **changes))


async def drawn(settings: Settings) -> str:
    """Describe what would serve the model, for ``--print-pipeline``, without starting a model."""
    install = load(settings.with_)
    if not settings.engine:
        return _drawn(settings, Started(ScriptedEngine(), planned(settings)[1]), install)
    async with start(settings) as running:
        return _drawn(settings, running, install)


def _drawn(settings: Settings, running: Started, install: Install) -> str:
    pipeline = install(assembled(settings, running, RunRegistry(Store(Nowhere())), Toolbox()))
    model = settings.model or (running.engine.models[0] if settings.engine else DEFAULT_MODEL)
    if running.recordings:
        return f"{model} is answered from {len(running.recordings.all)} recordings.\n\n{pipeline}"
    where = f"vLLM at {' and '.join(settings.engine)}" if settings.engine else "vLLM in this process"
    return f"{model} {_spoken(running.chat)}, and runs on {where}.\n\n{pipeline}"


def _spoken(chat: ChatModel | None) -> str:
    if chat is None:
        return "speaks Harmony"
    parsers = f"the parsers {' and '.join(chat.parser_names)}" if chat.parser_names else "no parser"
    return f"has a chat template, is read by {parsers}"


async def toolbox(settings: Settings) -> Toolbox:
    """Return the tools that the server runs for the model.

    An MCP server of the operator replaces the built-in tool of the same kind.
    """
    if settings.recordings:
        return Toolbox()
    allowed = AllowedNetworks.parse(settings.allow_address)
    configured = read_servers(settings.mcp_config) if settings.mcp_config else {}
    servers = McpServers(configured, allowed)
    hosts: dict[str, Host] = await sandboxed() if settings.sandbox else {}
    if settings.web_search:
        kind, _, url = settings.web_search.partition("=")
        key = settings.web_search_key.get_secret_value() if settings.web_search_key else ""
        hosts["browser"] = BrowserHost(search_backend(kind, url, key), allowed)
    own: dict[str, Host] = {kind: McpHost(servers, kind) for kind in HOSTED if kind in configured}
    return Toolbox({**hosts, **own}, servers)


async def sandboxed() -> dict[str, Host]:
    """Return the hosts of the tools whose sandbox works on this machine, and log the result of each probe."""
    python, container = await probe("python"), await probe("container")
    hosts: dict[str, Host] = {}
    if isinstance(python, Sandbox):
        hosts["python"] = PythonHost(python)
    if isinstance(container, Sandbox):
        hosts["container"] = ContainerHost(container)
    for name, probed in (("Python", python), ("Shell", container)):
        logger.info("%s for the model: %s", name, probed.describe() if isinstance(probed, Sandbox) else probed.reason)
    return hosts


def database(store: str) -> Database:
    """Return the database that the setting ``store`` names: the URL of PostgreSQL, or the path of an SQLite file."""
    if store.startswith(("postgresql://", "postgres://")):
        return PostgresDatabase(store)
    return SqliteDatabase(store)


def log_to_stderr(level: str) -> None:
    """Write the log to stderr, vLLM's included; each line of penstock names the response that it is about."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    logging.basicConfig(level=level, format=FORMAT)
    for handler in logging.getLogger().handlers:
        handler.addFilter(name_response)


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to its address but does not listen yet.

    Binding before the model is loaded reports a used port early.  Until the socket listens, connections are refused.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    return listening


async def _signal_to_stop() -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()


def greeting(settings: Settings, model: str) -> str:
    """The message that is printed once the server is up, with a first request to try."""
    body = json.dumps({"model": model, "input": "Say hello.", "stream": True})
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{settings.port}/v1"
    key = ' -H "Authorization: Bearer $API_KEY"' if settings.api_key_file or settings.api_keys else ""
    command = f"curl -N {url}/responses{key} -H 'Content-Type: application/json' -d '{body}'"
    return f"Serving {model} at {url}. Try:\n\n  {command}\n"


def main(arguments: Sequence[str]) -> None:
    """Run ``penstock serve`` with the ``arguments`` that follow it."""
    for argument in arguments:
        if place := KEY_PLACES.get(argument.split("=")[0]):
            sys.exit(f"penstock: a command line shows its keys to all processes: use {place}")
    # Until the server handles SIGTERM itself, the signal raises SystemExit, which unwinds the start.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        settings = CliApp.run(Settings, cli_args=list(arguments))
        log_to_stderr(settings.log_level)
        if settings.print_pipeline:
            print(uvloop.run(drawn(settings)))
        else:
            uvloop.run(serve(settings))
    except ValidationError as error:
        raise CannotRun(mistakes(error)) from error
    except UNSTARTABLE as error:
        sys.exit(f"penstock: {error}")
