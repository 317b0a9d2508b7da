"""The one start of a server: settings -> store, engine and tools -> pipeline -> API.

`penstock serve`, each of its frontends, and programs that embed penstock begin here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from uuid import uuid4

from pydantic_settings import SettingsError

from penstock.api.app import Api
from penstock.api.assembly import (
    admitting,
    assembled,
    database,
    keys_of,
    mcp_servers,
    recording_of,
    toolbox,
)
from penstock.api.backends import EngineStarter, start
from penstock.api.dialect import Dialect
from penstock.api.dialects.named import spoken
from penstock.api.embeddings import Upstream
from penstock.api.http.auth import Keys
from penstock.api.http.origins import Origins
from penstock.api.http.proxies import Proxies
from penstock.api.key_sources import seal_keys
from penstock.api.limits.admission import Admission
from penstock.api.peers import Membership, Peers
from penstock.api.resources.resources import ServerParts, opened
from penstock.api.runs.housekeeping import keep_sweeping, keep_tidying
from penstock.api.runs.scheduler import Scheduler
from penstock.api.runs.store_settings import NO_STORE, is_missing, without_password
from penstock.api.runs.watchdog import watching
from penstock.api.settings import Settings
from penstock.api.shadow import shadowed
from penstock.api.share import ALONE, Share
from penstock.pipeline.errors import CannotStart, StageError
from penstock.pipeline.plugins import HOSTS, TOOL, WrongPlugin, function_named, load
from penstock.pipeline.recordings.writer import make_folder
from penstock.stages.services import tracing
from penstock.stages.services.files.marks import number_by
from penstock.stages.services.prompts import Prompts
from penstock.stages.services.runs.run import RunRegistry
from penstock.stages.services.sealing import Sealer
from penstock.stages.services.standard_webhooks import Receiver, Signer
from penstock.stages.services.store.store import Store
from penstock.stages.services.tools import Toolbox
from penstock.stages.services.web.ssrf import AllowedNetworks
from penstock.stages.services.webhooks import Webhooks

logger = logging.getLogger(__name__)

UNSTARTABLE = (OSError, SettingsError, StageError, CannotStart, WrongPlugin)
"""Errors that the operator can fix: they end the command with their message, without a traceback."""


@dataclass(frozen=True)
class Running:
    """The parts of a server that runs."""

    keys: Keys
    prompts: Prompts
    scheduler: Scheduler
    api: Api


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
    loaded = preloaded(settings)
    async with AsyncExitStack() as closing:
        with while_starting or nullcontext():
            scheduler, tools = await closing.enter_async_context(_scheduler(settings, loaded, start_engine, share))
        parts = ServerParts(settings, scheduler, tools, Peers(siblings=siblings), loaded.prompts)
        joining = _joined(parts, loaded, url or _unreachable())
        api = await closing.enter_async_context(joining)
        closing.enter_context(watching(scheduler.pipeline, settings.slow_callback))
        yield Running(loaded.keys, loaded.prompts, scheduler, api)


@dataclass(frozen=True)
class Preloaded:
    """The parts of a server that it has before its model is loaded."""

    keys: Keys
    admission: Admission
    prompts: Prompts
    dialects: tuple[Dialect, ...]


def preloaded(settings: Settings) -> Preloaded:
    """Return the keys, their limits, the prompts and the dialects.

    Wrong ones, plug-ins and MCP servers end the start before the model is loaded.
    """
    tracing.is_wanted()
    load(settings.with_, settings.stages)
    dialects = spoken(settings.dialect)
    seal_keys(settings.seal_key_file, settings.seal_keys)
    mcp_servers(settings)
    for name in settings.tool:
        function_named(name, TOOL, HOSTS)
    admission = Admission(settings.limits)
    keys = keys_of(settings, admission)
    admission.name_of = keys.limits
    return Preloaded(keys, admission, Prompts(settings.prompts), dialects)


@asynccontextmanager
async def _scheduler(
    settings: Settings, loaded: Preloaded, start_engine: EngineStarter, share: Share
) -> AsyncGenerator[tuple[Scheduler, Toolbox], None]:
    """Run the store, the engine, the tools and the pipeline for the length of a block."""
    keys, admission = loaded.keys, loaded.admission
    async with AsyncExitStack() as closing:
        if settings.record:
            make_folder(settings.record)
        place = str(share.counts or settings.store)
        keeps, notifies = settings.store != NO_STORE, settings.webhook_secret is not None
        store = Store(database(place), settings.stale, keeps=keeps, notifies=notifies)
        closing.push_async_callback(store.close)
        is_new = is_missing(place)
        await store.open()
        if keeps:
            logger.info("The store is %s%s", without_password(place), ", which is new" if is_new else "")
        await keys.read_store(store.keys)
        closing.callback(asyncio.create_task(keys.follow_store(store.keys, settings.heartbeat)).cancel)
        exporter = tracing.wanted_exporter()
        if place != NO_STORE:
            admission.allowances, admission.reservations = store.allowances, store.reservations
        closing.callback(admission.close)
        tools = (
            Toolbox()
            if settings.recordings
            else await toolbox(settings, keys, admission.sandbox, store, admission.containers)
        )
        closing.push_async_callback(tools.close)
        backend = await closing.enter_async_context(start_engine(settings))
        await closing.enter_async_context(tracing.exporting(exporter))  # ends first: the responses have ended by then
        runs = RunRegistry(store, measures_keys=settings.metrics_by_key)
        sealing = seal_keys(settings.seal_key_file, settings.seal_keys) or [await store.secret("seal")]
        number_by(sealing[0])
        sealer = Sealer(sealing)
        tools = backend.toolbox or tools
        pipeline = await closing.enter_async_context(assembled(settings, backend, runs, tools, sealer, loaded.prompts))
        pipeline = await closing.enter_async_context(shadowed(settings, backend, pipeline))
        recording = recording_of(settings, backend)
        if recording:
            closing.push_async_callback(recording.close)
            pipeline = recording.tapped(pipeline)
        scheduler = Scheduler(
            admitting(pipeline, settings, backend, admission.of, share),
            backend.engine,
            runs,
            store,
            limit=share.of(settings.max_background),
            detaches=settings.detach,
            restarts=settings.resume_interrupted,
            unserved_after=settings.unserved_after,
            admission=admission,
            aliases=settings.aliases,
        )
        if recording:
            scheduler.closing = recording.closing
        yield scheduler, tools


@asynccontextmanager
async def _joined(parts: ServerParts, loaded: Preloaded, url: str) -> AsyncGenerator[Api, None]:
    """Join the servers of the store, and open the resources, for the length of a block."""
    settings, scheduler = parts.settings, parts.scheduler
    recovery, store = scheduler.recovery, scheduler.store
    origins = Origins(settings.called(url), settings.allow_origin, keyed=loaded.keys.are_needed)
    async with Membership(
        store.servers, url, recovery.recover, scheduler.release_lost, settings.heartbeat, settings.stale
    ):
        housekeeping = (
            asyncio.create_task(keep_sweeping(store, settings.store_ttl, settings.stream_ttl)),
            asyncio.create_task(keep_tidying(scheduler.admission, scheduler.in_flight)),
        )
        try:
            async with _delivering(settings, store, loaded.keys), opened(parts) as resources:
                yield Api(
                    scheduler,
                    settings.keep_alive,
                    loaded.keys,
                    parts.peers,
                    recorded_if=settings.recorded_if,
                    origins=origins,
                    serves_metrics=settings.metrics_port is None,
                    metrics_key=settings.metrics_key.get_secret_value() if settings.metrics_key else "",
                    dialects=loaded.dialects,
                    embeddings=_upstream(settings),
                    resources=resources,
                    proxies=Proxies.parse(settings.trusted_proxy, settings.forwarded_header),
                )
        finally:
            for task in housekeeping:
                task.cancel()


@asynccontextmanager
async def _delivering(settings: Settings, store: Store, keys: Keys) -> AsyncGenerator[None, None]:
    """Deliver webhooks for the length of a block, if the settings have a secret for them."""
    url, secret = settings.webhook, settings.webhook_secret
    if secret is None:
        yield
        return
    signer = Signer.of(secret.get_secret_value())

    def receiver_of(owner: str) -> Receiver | None:
        if own := keys.webhook(owner):
            return Receiver(own, signer.of_owner(owner))
        return Receiver(url, signer) if url else None

    allowed = AllowedNetworks.parse(settings.allow_address)
    async with Webhooks(store.webhooks, receiver_of, allowed).delivering():
        yield


def _upstream(settings: Settings) -> Upstream | None:
    """Return the server that embeds, if there is one."""
    key = settings.embeddings_key.get_secret_value() if settings.embeddings_key else ""
    return Upstream(settings.embeddings, key) if settings.embeddings else None


def _unreachable() -> str:
    """Return a name for a server that has no URL of its own; a name in use would declare its server dead."""
    return f"process:{uuid4()}"
