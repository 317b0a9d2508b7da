"""The engine that the settings name, with the stages for its model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from penstock.api.settings import Settings
from penstock.api.settings.effects import Answering, warn_of_unused
from penstock.api.settings.engine_settings import DEFAULT_MODEL
from penstock.api.settings.from_vllm import instead_of
from penstock.api.settings.sources import option_name
from penstock.api.start.assembly import RunningEngine, rehearsed
from penstock.api.start.loading import Loading
from penstock.api.start.model_files import model_files
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.plugins import ENGINES, optional_function
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.services.engines.custom import open_engine
from penstock.services.engines.engine import UNLIMITED, TextBackend
from penstock.services.engines.replicas import PrefixCaches
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.engines.vllm import (
    ANYTHING,
    VllmPlan,
    Watch,
    WrongOption,
    check_arguments,
    default_sampling,
    has_plugins,
    no_vllm,
    option_names,
    plan_vllm,
    speaks_harmony,
)
from penstock.services.engines.vllm_cores import CoreClient
from penstock.services.engines.vllm_http import start_vllm_http
from penstock.services.web.image_cache import ImageCache
from penstock.services.web.ssrf import AllowedNetworks
from penstock.stages.models.chat.load import NO_PARSER, ChatOptions, load_chat_model, read_config
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.parsers import UnknownParser, check_names
from penstock.stages.models.chat.registry import operator_parser
from penstock.stages.models.chat.standalone import ModelFiles, load_from_files
from penstock.stages.models.harmony.vocabulary import THOUGHT, load_encoding
from penstock.stages.models.vllm_private import Greeting, greeted
from penstock.stages.recordings.converse import RecordedTools
from penstock.stages.recordings.recordings import read_recordings
from penstock.stages.render.chat.grammar import holds_optional_calls
from penstock.stages.render.harmony.grammar import WARM_UP
from penstock.stages.responses import (
    NO_DEFAULTS,
    ModelStages,
    chat_stages,
    harmony_stages,
    recorded_stages,
    text_stages,
)

logger = logging.getLogger(__name__)

ENGINE_WAIT = 600.0
"""Seconds to wait for an engine elsewhere."""


EngineStarter: TypeAlias = Callable[[Settings], AbstractAsyncContextManager[RunningEngine]]
"""A function that starts the engine of the settings for the length of a block."""


def start(settings: Settings) -> AbstractAsyncContextManager[RunningEngine]:
    """Start the engine that the settings name, or those of several models, for the length of a block."""
    if settings.models:
        several: EngineStarter | None = optional_function("several", ENGINES)
        if several is None:
            raise CannotStart("[models] needs penstock.extensions.models, which is not installed")
        return several(settings)
    if settings.recordings:
        return from_recordings(settings, settings.recordings)
    if settings.engine_factory:
        return of_operator(settings, settings.engine_factory)
    return over_http(settings) if settings.engine else in_this_process(settings)


@asynccontextmanager
async def start_shown(settings: Settings) -> AsyncGenerator[RunningEngine, None]:
    """Start the engine as `start` does, and report for how long a model has been loading in this process."""
    async with AsyncExitStack() as closing:
        here = settings.in_this_process
        shown = closing.enter_context(loading(here)) if here else None
        running = await closing.enter_async_context(start(settings))
        if shown:
            shown.finish()
        yield running


def reason_to_wait(settings: Settings) -> str:
    """Return what a server does while it starts, for its clients."""
    here = settings.in_this_process
    return f"loading {here.model or DEFAULT_MODEL}" if here else "waiting for the engine"


def loading(settings: Settings) -> Loading:
    """Return the block in which the model of the settings is loaded, for a command."""
    is_verbose = settings.verbose or settings.log_level == "DEBUG"
    return Loading(settings.model or DEFAULT_MODEL, is_verbose=is_verbose, as_json=settings.log_format == "json")


@asynccontextmanager
async def in_this_process(settings: Settings) -> AsyncGenerator[RunningEngine, None]:
    """Run vLLM in this process; its workers are child processes."""
    plan, model = planned(settings)
    await rehearsed(settings, RunningEngine(ScriptedEngine(models=plan.models), model))
    engine = plan.start()
    try:
        await engine.warm_up(WARM_UP if model.encoding == "harmony" else ANYTHING)
        yield RunningEngine(engine, model)
    finally:
        await engine.close()


@asynccontextmanager
async def of_frontend(
    settings: Settings, client: CoreClient, watch: Watch, greetings: list[Greeting]
) -> AsyncGenerator[RunningEngine, None]:
    """Use the engine's cores, which the supervisor has started; ``greetings`` gets their first messages."""
    plan, model = planned(settings, client.index)
    with greeted(client.greetings) as heard:
        engine = plan.start(client, watch)
    greetings.extend(heard)
    try:
        if client.greetings:
            await engine.come_back()
        else:
            await engine.warm_up(WARM_UP if model.encoding == "harmony" else ANYTHING)
        yield RunningEngine(engine, model)
    finally:
        await engine.close()


def planned(settings: Settings, process: int = 0) -> tuple[VllmPlan, ModelStages]:
    """Return vLLM's plan for an engine of this server, and the stages for its model.

    ``process`` is the number of the frontend that uses the engine, or -1 for the supervisor.
    """
    warn_of_unused(settings, Answering.HERE)
    model = settings.model or DEFAULT_MODEL
    plan = plan_vllm(model, settings.engine_options, processes=settings.frontends, process=process)
    chat = None if plan.speaks_harmony else load_chat_model(plan.config, settings.chat)
    plan.bound_thoughts(chat.parsers.thinking if chat else THOUGHT)
    return plan, stages(settings, chat, default_sampling(plan.config))


@asynccontextmanager
async def over_http(
    settings: Settings, wait: float = ENGINE_WAIT, known: ModelStages | None = None
) -> AsyncGenerator[RunningEngine, None]:
    """Generate on vLLM servers over HTTP, with the stages for their model, if these are ``known`` already.

    The template, tokenizer and parsers of a chat model are still loaded here; only its weights are elsewhere.  The
    servers do not always reveal that a model speaks Harmony, so the config of the model decides.
    """
    warn_of_unused(settings, Answering.OVER_HTTP)
    key = settings.engine_key.get_secret_value() if settings.engine_key else None
    async with _prefix_caches(settings) as caches:
        engine = await start_vllm_http(settings.engine, api_key=key, wait=wait)
        if settings.hints:
            await engine.ask_for_hints()
        if caches:
            engine.follow(caches)
        if settings.tool_strict_level != "auto" and not engine.holds_grammars:
            logger.warning("--tool-strict-level holds no calls as long as an engine refuses structured output")
        try:
            model = None if engine.speaks_harmony else settings.model or engine.root
            if known is None:
                known = await asyncio.to_thread(stages_elsewhere, settings, model)
            yield RunningEngine(engine, known)
        finally:
            await engine.close()


@asynccontextmanager
async def _prefix_caches(settings: Settings) -> AsyncGenerator[PrefixCaches | None, None]:
    """Listen to the KV events that the settings name, for the length of a block; None if they name none."""
    if not settings.kv_events:
        yield None
        return
    if find_spec("zmq") is None:
        raise CannotStart("--kv-events needs pyzmq: pip install 'penstock-llm[kv-events]'")
    from penstock.services.engines.kv_events import KvEvents  # noqa: PLC0415 - pyzmq comes with an extra

    engines = (url.rstrip("/") for url in settings.engine)
    try:
        caches = KvEvents(dict(zip(engines, settings.kv_events, strict=True)))
    except ValueError as error:
        raise CannotStart(f"--kv-events: {error}") from error
    try:
        yield caches
    finally:
        await asyncio.to_thread(caches.close)


@asynccontextmanager
async def of_operator(settings: Settings, factory: str) -> AsyncGenerator[RunningEngine, None]:
    """Run an engine of the operator's own; it speaks Harmony, unless the config of MODEL says otherwise."""
    async with open_engine(factory, settings) as engine:
        is_text = isinstance(engine, TextBackend)
        warn_of_unused(settings, Answering.TEXTS if is_text else Answering.OWN)
        yield RunningEngine(engine, text_stages() if is_text else stages_elsewhere(settings, settings.model))


def check_options(settings: Settings) -> None:
    """Raise `WrongOption` for an option that vLLM does not have; without vLLM, its options are not known.

    vLLM's parser, whose import takes seconds, is used only for what its source cannot tell: short forms, beginnings of
    names, parts of tables, and options of vLLM's plug-ins.
    """
    here = settings.in_this_process
    if here is None or find_spec("vllm") is None:
        return
    known, names = option_names(), [option_name(part) for part in here.engine_options if part.startswith("-")]
    unknown = [name for name in dict.fromkeys(names) if name.replace("--no-", "--", 1) not in known]
    wrong = [name for name in unknown if instead_of(name) or not (_is_cut(name, known) or has_plugins())]
    if wrong:
        raise WrongOption(f"unrecognized arguments: {' '.join(wrong)}", known)
    if unknown:
        check_arguments(here.engine_options)


def model_here(settings: Settings) -> str:
    """Describe the model that this process would load; raise `CannotStart` if vLLM could not, or is not installed."""
    if find_spec("vllm") is None:
        raise no_vllm()
    return model_files(settings.model or DEFAULT_MODEL, settings.engine_options)


def _is_cut(name: str, known: Iterable[str]) -> bool:
    """Return True if a name may be a short form or a beginning of a known one, or a part of its table."""
    return not name.startswith("--") or "." in name or any(each.startswith(name) for each in known)


def stages_elsewhere(settings: Settings, model: str | None) -> ModelStages:
    """Return the stages for the ``model`` of an engine elsewhere by its config, or for Harmony if it is None."""
    if model is None:
        return stages(settings, None)
    if find_spec("vllm") is None:
        files = ModelFiles(model)
        own = None if files.speaks_harmony else load_from_files(files, settings.chat)
        return stages(settings, own, files.sampling)
    config = read_config(model)
    chat = None if speaks_harmony(config) else load_chat_model(config, settings.chat)
    return stages(settings, chat, default_sampling(config))


@asynccontextmanager
async def from_recordings(settings: Settings, folder: Path) -> AsyncGenerator[RunningEngine, None]:
    """Answer from recordings, without a model; MODEL, if given, is one more name under which they answer."""
    warn_of_unused(settings, Answering.RECORDINGS)
    recordings = read_recordings(folder)
    models = tuple(dict.fromkeys(filter(None, (settings.model, *recordings.models))))
    if texts := recordings.texts:
        some = ", ".join(repr(shortened(text, 60)) for text in texts[:3])
        logger.info(
            "Recorded inputs without tools: %s%s", some, f" and {rest} more" if (rest := len(texts[3:])) else ""
        )
    engine = ScriptedEngine(context_length=UNLIMITED, models=models)
    model = recorded_stages(load_encoding(), recordings, settings.replay_speed)
    yield RunningEngine(engine, model, RecordedTools(recordings=recordings))


def stages(settings: Settings, chat: ChatModel | None, sampling: Mapping[str, float] = NO_DEFAULTS) -> ModelStages:
    """Return the stages for a chat model, or for Harmony if it is None, with the defaults of ``sampling``."""
    if sampling:
        named = ", ".join(f"{name} {value}" for name, value in sampling.items())
        logger.info("Requests that say nothing else are sampled as the model's generation config says: %s", named)
    if chat:
        if settings.harmony_system_instructions:
            logger.warning("The model has a chat template, which decides where instructions stand")
        if settings.tool_strict_level != "auto" and not holds_optional_calls(chat):
            logger.warning("--tool-strict-level holds no calls that the model may omit: no grammar describes its calls")
        return chat_stages(chat, ImageCache(AllowedNetworks.parse(settings.allow_address)), sampling)
    _check_parsers(settings)
    if settings.chat != ChatOptions():
        logger.warning("The model speaks Harmony: parsers and templates are for others")
    return harmony_stages(load_encoding(), sampling, system_instructions=settings.harmony_system_instructions)


def _check_parsers(settings: Settings) -> None:
    """Raise `CannotStart` or `WrongPlugin` for a wrong parser: Harmony needs none, but it is a mistake all the same."""
    settings.chat.import_plugins()
    for option, names in (
        ("--reasoning-parser", (settings.reasoning_parser, None)),
        ("--tool-call-parser", (None, settings.tool_call_parser)),
    ):
        if any(name and operator_parser(name, option) for name in names):
            continue
        if {*names} - {None, NO_PARSER} and find_spec("vllm") is not None:
            try:
                check_names(names)
            except UnknownParser as error:
                raise CannotStart(f"{option}: {error}") from error
