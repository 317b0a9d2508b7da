"""The parts of a server that the settings decide: database, tools, and the pipeline with the stages of the operator."""

from __future__ import annotations

import logging
import shlex
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from penstock.api.file_reading import file_settings
from penstock.api.http.api_key import ApiKey
from penstock.api.http.auth import Keys
from penstock.api.http.key_sources import UnusableKeys
from penstock.api.limits.admission import Admission
from penstock.api.limits.table import KeyLimits
from penstock.api.runs.store_settings import NO_STORE
from penstock.api.settings import Settings
from penstock.api.settings.engine_settings import DEFAULT_MODEL
from penstock.api.start.recording import header, recorder
from penstock.api.start.share import Share
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.logs import nearest
from penstock.pipeline.plugins import load
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.tools import StrictLevel
from penstock.pipeline.recordings.format import Header
from penstock.pipeline.recordings.recorder import Recorder
from penstock.pipeline.recordings.sampling import Condition
from penstock.services.containers import OwnerLimits, no_owner_limits
from penstock.services.engines.custom import guarded_engine
from penstock.services.engines.engine import (
    Backend,
    Bounded,
    Engine,
    HoldsGrammars,
    TextBackend,
    engine_of,
    has_several,
    title_of,
)
from penstock.services.file_reading import open_files
from penstock.services.mcp_config import ServerConfig, read_servers
from penstock.services.model_names import is_name
from penstock.services.prompts import Prompts
from penstock.services.runs.run import RunRegistry
from penstock.services.sealing import Sealer
from penstock.services.slots import Limit, sandbox_slots, unlimited
from penstock.services.store.database import Database, NullDatabase
from penstock.services.store.heartbeats import STALE
from penstock.services.store.named import named_database
from penstock.services.store.store import Store
from penstock.services.toolbox import open_toolbox
from penstock.services.tools import ToolAccess, Toolbox
from penstock.stages.converse.tool_loop import Limits
from penstock.stages.normalize.recall import all_models
from penstock.stages.normalize.resolve import CacheSharing
from penstock.stages.normalize.tool_types import leavable, named
from penstock.stages.optional.admit import Admit, Places
from penstock.stages.optional.log import LogOutputs, LogPrompts
from penstock.stages.recordings.converse import partly_run
from penstock.stages.responses import (
    ModelStages,
    aliasing,
    allowing,
    prompting,
    reading_files,
    responses_pipeline,
    scoring,
    sealing,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunningEngine:
    """A running engine, the stages for its model, and tools that replace those of the settings, if given."""

    engine: Engine | TextBackend
    model: ModelStages
    toolbox: Toolbox | None = None
    settings_of: Callable[[str], Settings] | None = None
    """Gives the settings of one of several models, by a name that is served."""
    aliases: Mapping[str, str] | None = None
    """Patterns of other names in place of those of the settings; they may change while the server runs."""
    allowed: Callable[[str], Collection[str] | None] = all_models
    """Gives the patterns of the names of models that an owner may use; None for all."""
    may_record: Callable[[str], bool] = lambda _: True
    """True for an owner whose responses may be recorded."""
    take: Callable[[Settings], None] | None = None
    """Adds, changes and removes models, so that they are those of the settings; raises `CannotStart` for others."""

    def under(self, keys: Keys) -> RunningEngine:
        """Return it for clients with these keys, which say what models they may use and if they may be recorded."""
        model = self.model.allowing(keys.models)
        return replace(self, allowed=keys.models, model=model, may_record=keys.may_record)


def mcp_servers(settings: Settings) -> dict[str, ServerConfig]:
    """Return the MCP servers of the operator, by label."""
    return read_servers(settings.mcp_config) if settings.mcp_config else {}


def keys_of(settings: Settings, admission: Admission) -> Keys:
    """Return the API keys of the settings, each with limits of the admission; raises `UnusableKeys`."""
    operator = settings.operator_key.get_secret_value() if settings.operator_key else ""
    keys = Keys(
        settings.api_key_file,
        settings.api_keys,
        settings.tool_labels,
        reads_store=settings.store_keys,
        operator=operator,
        obstacle=obstacles(settings, admission),
    )
    keys.are_needed = settings.has_keys
    check_keys(keys.own, settings, admission.tables)
    return keys


def check_keys(keys: Iterable[ApiKey], settings: Settings, tables: Collection[str]) -> None:
    """Raise `UnusableKeys` for the first key that a server with these settings and tables of limits cannot serve."""
    for key in keys:
        if reason := obstacle(key, settings, tables):
            raise UnusableKeys(f"the API key {key.title} has {reason}")


def obstacles(settings: Settings, admission: Admission) -> Callable[[ApiKey], str]:
    """Return the function that says why a server cannot serve a key: its limits may change while it runs."""
    return lambda key: obstacle(key, settings, admission.tables)


def obstacle(key: ApiKey, settings: Settings, tables: Collection[str]) -> str:
    """Return why a server with these settings and tables of limits cannot serve a key; empty if it can."""
    if key.webhook and settings.store == NO_STORE:
        return "webhook=, which needs a store"
    if key.webhook and settings.webhook_secret is None:
        return "webhook=, which needs a secret: set PENSTOCK_WEBHOOK_SECRET"
    return unknown_limits(key, tables) or unknown_models(key, settings)


def unknown_limits(key: ApiKey, tables: Collection[str]) -> str:
    """Return that a key names limits that are not among the tables of ``--limits``; empty if it does not."""
    if not key.limits or key.limits in tables:
        return ""
    return f"limits={key.limits}, and --limits has no table of that name{nearest(key.limits, sorted(tables))}"


def unknown_models(key: ApiKey, settings: Settings) -> str:
    """Return that a key names a model that is not among several of the settings; empty if it does not.

    The names of a single model are not known yet: its engine gives them.  A pattern may fit none.  A name may be one
    that a pattern of the settings has.
    """
    known = {*settings.models, *settings.aliases, *(name for table in settings.models.values() for name in table.names)}
    names = filter(is_name, sorted(key.models or ()))
    unknown = [name for name in names if not any(name == one or fnmatchcase(name, one) for one in known)]
    if not (settings.models and unknown):
        return ""
    return f"models={unknown[0]}, and no model has that name{nearest(unknown[0], sorted(filter(is_name, known)))}"


async def toolbox(
    settings: Settings,
    keys: Keys,
    limit: Limit = unlimited,
    store: Store | None = None,
    container_limits: Callable[[str], OwnerLimits] = no_owner_limits,
) -> Toolbox:
    """Return the tools that the server runs for the model, and the clients that may use them.

    ``limit`` limits the calls of a client that run in sandboxes, and ``container_limits`` its containers.  The tools
    keep in the ``store`` what outlives a response.
    """
    tools = await open_toolbox(
        replace(
            file_settings(settings),
            mcp_config=settings.mcp_config,
            web_search=settings.web_search,
            search_key=settings.web_search_key.get_secret_value() if settings.web_search_key else "",
            slots=sandbox_slots(settings.frontends) if settings.sandbox else None,
            limit=limit,
            store=store if store and store.keeps else None,
            container_ttl=settings.container_ttl,
            container_memory=settings.container_memory,
            program_ttl=settings.program_ttl,
            container_limits=container_limits,
            call_seconds=settings.tool_timeout,
            embeddings=settings.embeddings or "",
            embeddings_key=settings.embeddings_key.get_secret_value() if settings.embeddings_key else "",
        ),
        settings.tool,
    )
    of_all = named(settings.allow_tool, tools.own) if settings.allow_tool else None
    return replace(tools, access=ToolAccess(of_all, keys.tools))


def database(store: str) -> Database:
    """Return the database of the setting ``store``, not open yet; raises `WrongPlugin` as `named_database` does."""
    return NullDatabase() if store == NO_STORE else named_database(store)


@asynccontextmanager
async def open_store(
    place: str, stale: float = STALE, *, keeps: bool = True, notifies: bool = False
) -> AsyncGenerator[Store, None]:
    """Open the store of that setting for the length of a block; raises `StoreFailed` if it cannot be used."""
    store = Store(database(place), stale, keeps=keeps, notifies=notifies)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def assembled(
    settings: Settings,
    running: RunningEngine,
    runs: RunRegistry,
    tools: Toolbox,
    sealer: Sealer,
    prompts: Prompts,
) -> AsyncGenerator[Pipeline[CreateResponse, ResponseEvent], None]:
    """Yield the pipeline of these settings, with all stages that the operator inserts, for the length of a block."""
    limits = Limits(call_seconds=settings.tool_timeout, turns=settings.max_turns)
    caches = CacheSharing(settings.share_caches, settings.salt_caches)
    settings_of = running.settings_of or (lambda _: settings)

    def level(model: str) -> StrictLevel | UnsetType:
        return strict_level(settings_of(model).tool_strict_level, engine_of(running.engine, model))

    tools = replace(tools, left_out=leavable(settings.leave_out_tool), strict_level=level)
    pipeline = responses_pipeline(running.model, running.engine, runs, tools, limits, caches)
    pipeline = allowing(aliasing(sealing(pipeline, sealer), aliases_of(settings, running)), running.allowed)
    pipeline = declared = prompting(reading_files(pipeline, open_files(file_settings(settings))), prompts)
    if settings.record_logprobs:
        pipeline = scoring(pipeline, recorded_if(settings, running).chooses)
    if settings.engine_factory:
        pipeline = guarded_engine(running.engine, pipeline)
    if settings.log_prompts:
        if "render" not in pipeline.names():
            raise CannotStart("--log-prompts needs the stage render, which this pipeline lacks")
        log_prompts = LogPrompts(lambda model: running.model.of(model).decode, settings.max_log_len)
        pipeline = pipeline.insert_after("render", "log prompts", log_prompts)
    if settings.log_outputs:
        pipeline = pipeline.insert_after("emit", "log outputs", LogOutputs(settings.max_log_len))
    async with load(settings.plugins, settings.tables)(pipeline) as pipeline:
        _warn_of_partly_run(pipeline, declared)
        yield pipeline


def aliases_of(settings: Settings, running: RunningEngine) -> Mapping[str, str]:
    """Return the patterns of other names for models, each with the name of one that is served."""
    return settings.aliases if running.aliases is None else running.aliases


def strict_level(chosen: Literal["auto"] | StrictLevel, engine: Backend) -> StrictLevel | UnsetType:
    """Return the level to which all calls are held: none as long as an engine cannot hold output to a grammar."""
    if chosen == "auto" or (isinstance(engine, HoldsGrammars) and not engine.holds_grammars):
        return UNSET
    return chosen


def _warn_of_partly_run(pipeline: Pipeline[Any, Any], declared: Pipeline[Any, Any]) -> None:
    for name, when in partly_run(pipeline).items():
        if name not in declared.names() or pipeline.stage(name) is not declared.stage(name):
            logger.warning(
                "The stage %r %s: answers that were recorded after it do not pass it. It runs with a model, and in %s",
                name,
                when,
                _replay_through(name, pipeline.names()),
            )


def _replay_through(name: str, names: Sequence[str]) -> str:
    """Return the command by which recorded tokens pass a stage inside ``converse``, tools or not."""
    if "generate" in names[: names.index(name)]:
        return f"penstock replay FOLDER/tokens.jsonl --to {shlex.quote(name)} --with ..."
    return "penstock replay FOLDER --from render --with ..., if no tools ran"


def admitting(
    pipeline: Pipeline[CreateResponse, ResponseEvent],
    settings: Settings,
    running: RunningEngine,
    limits_of: Callable[[str], KeyLimits],
    share: Share,
) -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the pipeline with the stage that holds prompts back while the engine is full, if its places are known.

    ``limits_of`` gives the limits of an owner, and ``share`` the part of this process in the places.
    """
    engine = running.engine

    def places_of(own_settings: Settings, own_engine: Backend) -> Places | None:
        own = own_engine if isinstance(own_engine, Bounded) else None
        places = own_settings.engine_places or (own.places if own else None)
        if places is None:
            return None
        slots = share.slots(places, lambda owner: limits_of(owner).weight)
        most = share.of(own.most_prompts) if own and own.most_prompts is not None else None
        return Places(slots, most, own_settings.engine_wait)

    if "generate" not in pipeline.names():
        return pipeline
    settings_of = running.settings_of or (lambda _: settings)
    made: dict[str, tuple[Settings, Places | None]] = {}

    def of_model(model: str) -> Places | None:
        own_settings, name = settings_of(model), title_of(engine, model)
        if name not in made or made[name][0] is not own_settings:
            made[name] = own_settings, places_of(own_settings, engine_of(engine, model))
        return made[name][1]

    if running.settings_of is None and of_model("") is None:
        return pipeline
    runs: RunRegistry = pipeline.stage("persist").runs
    admit = Admit(of_model, runs.is_accepted, lambda owner: limits_of(owner).wait)
    return pipeline.insert_before("generate", "admit", admit)


async def rehearsed(settings: Settings, running: RunningEngine) -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the pipeline of these settings without a store or tools, to draw it or to find misplaced stages early.

    Plug-ins have ended when this returns.
    """
    runs, tools = RunRegistry(Store(NullDatabase())), running.toolbox or Toolbox()
    async with assembled(settings, running, runs, tools, Sealer(), Prompts()) as pipeline:
        return pipeline


def recording_of(settings: Settings, running: RunningEngine) -> Recorder | None:
    """Return the recorder of ``--record``, or None without that option."""
    if settings.record is None:
        return None
    is_chat = not has_several(running.engine) and running.model.encoding == "chat"
    if is_chat and not settings.record_texts:
        logger.info("Tokens are not recorded: of this model, texts cannot be distinguished from markup")
    described = cache(partial(_header, settings, running))
    return recorder(settings, settings.record, described, recorded_if(settings, running))


def recorded_if(settings: Settings, running: RunningEngine) -> Condition:
    """Return the condition under which a response is recorded: that of the settings, unless its key forbids it."""
    return replace(settings.recorded_if, allows=running.may_record)


def _header(settings: Settings, running: RunningEngine, model: str) -> Header:
    own = running.settings_of(model) if running.settings_of else settings
    root = getattr(engine_of(running.engine, model), "root", None if own.engine else DEFAULT_MODEL)
    return header(own, None if own.recordings else own.model or root, running.model.of(model).encoding)
