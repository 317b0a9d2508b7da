"""The door of resources: groups of routes beside the dialects, such as those of files.

Each is an entry point of the group ``penstock.resources``: a function that takes the `ServerParts`, and returns a block
that yields the routes of the group and lasts as long as the server.  Nothing here imports a resource.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from aiohttp import web

from penstock.api.dialect import Dialect
from penstock.api.http.auth import Keys
from penstock.api.peers import Peers
from penstock.api.runs.scheduler import Scheduler
from penstock.api.settings import Settings
from penstock.pipeline.plugins import RESOURCES, optional_function
from penstock.services.prompts import Prompts
from penstock.services.tools import Toolbox

BASE = "/v1"
"""The base URL of all resources."""

SHIPPED = (
    "accounts",
    "audit",
    "batches",
    "containers",
    "files",
    "live",
    "passing",
    "prompts",
    "rollouts",
    "sign_in",
    "uploads",
    "vector_stores",
    "weights",
)


@dataclass(frozen=True)
class ServerParts:
    """The parts of a server that resources may use."""

    settings: Settings
    scheduler: Scheduler
    tools: Toolbox
    peers: Peers
    prompts: Prompts = field(default_factory=Prompts)
    keys: Keys = field(default_factory=Keys)
    dialects: tuple[Dialect, ...] = ()
    at_sighup: list[Callable[[], None]] = field(default_factory=list)
    """Functions that read files again: each logs what it has read, or why the file stays in effect as it was."""
    routes: list[web.RouteDef] = field(default_factory=list)
    """The routes of the resources that are open."""


Resource: TypeAlias = Callable[[ServerParts], AbstractAsyncContextManager[Sequence[web.RouteDef]]]
"""A function that opens a resource for the length of a block, and yields its routes."""


AnyResource = TypeVar("AnyResource", bound=Resource)


def checked(check: Callable[[Settings], None]) -> Callable[[AnyResource], AnyResource]:
    """Let a resource check its settings before the model is loaded: ``check`` raises `CannotStart` for wrong ones."""

    def add(resource: AnyResource) -> AnyResource:
        resource.__dict__["check"] = check
        return resource

    return add


def check_resources(settings: Settings, names: Sequence[str] = SHIPPED) -> None:
    """Raise `CannotStart` for settings that a resource refuses."""
    for name in names:
        check = getattr(optional_function(name, RESOURCES), "check", None)
        if check is not None:
            check(settings)


@asynccontextmanager
async def opened(parts: ServerParts, names: Sequence[str] = SHIPPED) -> AsyncGenerator[tuple[web.RouteDef, ...], None]:
    """Open the resources of these names for the length of a block, and yield the routes of all."""
    async with AsyncExitStack() as closing:
        for name in names:
            resource: Resource | None = optional_function(name, RESOURCES)
            if resource is not None:
                parts.routes.extend(await closing.enter_async_context(resource(parts)))
        yield tuple(parts.routes)
