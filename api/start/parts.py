"""The parts that `penstock.server` joins: what a server reads before it starts, and what runs beside its pipeline."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

from pydantic_settings import SettingsError

from penstock.api.app import Api
from penstock.api.dialect import Dialect
from penstock.api.dialects.named import spoken
from penstock.api.http.auth import Keys
from penstock.api.http.key_sources import seal_keys
from penstock.api.limits.admission import Admission
from penstock.api.peers import Membership
from penstock.api.resources.resources import check_resources
from penstock.api.runs.housekeeping import keep_sweeping, keep_tidying
from penstock.api.runs.scheduler import Scheduler
from penstock.api.runs.store_settings import NO_STORE, is_missing, without_password
from penstock.api.settings import Settings
from penstock.api.start.assembly import keys_of, mcp_servers, open_store, toolbox
from penstock.pipeline.errors import CannotStart, StageError
from penstock.pipeline.plugins import HOSTS, TOOL, WrongPlugin, function_named, load
from penstock.pipeline.recordings.writer import make_folder
from penstock.pipeline.tasks import beside
from penstock.services import tracing
from penstock.services.file_marks import number_by
from penstock.services.prompts import Prompts
from penstock.services.sealing import Sealer
from penstock.services.standard_webhooks import Receiver, Signer
from penstock.services.store.store import Store
from penstock.services.tools import Toolbox
from penstock.services.web.ssrf import AllowedNetworks
from penstock.services.webhooks import Webhooks

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
    take_models: Callable[[Settings], None] | None = None
    """Takes the models of settings in place of those that run; None for a server of one model."""
    at_sighup: Sequence[Callable[[], None]] = ()
    """Functions of resources that read their files again."""


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
    load(settings.plugins, settings.tables)
    dialects = spoken(settings.dialect)
    seal_keys(settings.seal_key_file, settings.seal_keys)
    mcp_servers(settings)
    for name in settings.tool:
        function_named(name, TOOL, HOSTS)
    check_resources(settings)
    admission = Admission(settings.limits)
    keys = keys_of(settings, admission)
    admission.name_of = keys.limits
    return Preloaded(keys, admission, Prompts(settings.prompts), dialects)


@asynccontextmanager
async def opened_store(settings: Settings, loaded: Preloaded, place: str) -> AsyncGenerator[Store, None]:
    """Open the store at ``place``, with its keys and limits, and the folder to record in, as long as a block."""
    if settings.record:
        make_folder(settings.record)
    keeps, notifies = settings.store != NO_STORE, settings.webhook_secret is not None
    is_new = is_missing(place)
    async with open_store(place, settings.stale, keeps=keeps, notifies=notifies) as store:
        if keeps:
            logger.info("The store is %s%s", without_password(place), ", which is new" if is_new else "")
        await loaded.keys.read_store(store.keys)
        loaded.keys.remembered = store.words_of
        store.names = loaded.keys
        if place != NO_STORE:
            loaded.admission.allowances, loaded.admission.reservations = store.allowances, store.reservations
        try:
            async with beside(loaded.keys.follow_store(store.keys, settings.heartbeat)):
                yield store
        finally:
            loaded.admission.close()


@asynccontextmanager
async def opened_tools(settings: Settings, loaded: Preloaded, store: Store) -> AsyncGenerator[Toolbox, None]:
    """Open the tools that the server runs for its model, for the length of a block; recordings need none."""
    limits = loaded.admission
    none = bool(settings.recordings)
    tools = Toolbox() if none else await toolbox(settings, loaded.keys, limits.sandbox, store, limits.containers)
    try:
        yield tools
    finally:
        await tools.close()


async def sealer_of(settings: Settings, store: Store) -> Sealer:
    """Return what seals thoughts; its key also numbers the marks of files."""
    keys = seal_keys(settings.seal_key_file, settings.seal_keys) or [await store.secret("seal")]
    number_by(keys[0])
    return Sealer(keys)


@asynccontextmanager
async def joined(settings: Settings, scheduler: Scheduler, url: str) -> AsyncGenerator[None, None]:
    """Be one of the servers of the store, which reach this one at ``url``, for the length of a block."""
    recovery, store = scheduler.recovery, scheduler.store
    async with Membership(
        store.servers,
        url=url,
        recover=recovery.recover,
        release_lost=scheduler.release_lost,
        heartbeat=settings.heartbeat,
        stale=settings.stale,
    ):
        sweeping = keep_sweeping(store, settings.store_ttl, settings.stream_ttl)
        async with beside(sweeping, keep_tidying(scheduler.admission, scheduler.in_flight)):
            yield


@asynccontextmanager
async def delivering(settings: Settings, store: Store, keys: Keys) -> AsyncGenerator[None, None]:
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


def unreachable() -> str:
    """Return a name for a server that has no URL of its own; a name in use would declare its server dead."""
    return f"process:{uuid4()}"
