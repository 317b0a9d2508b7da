"""Servers to which a server passes requests on that it does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import SecretStr

from penstock.api.settings import Settings
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.server import ScriptedServer, running_server

EMBEDDED = {"object": "list", "model": "e", "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}]}

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """A request that a server got."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def model(self) -> Any:
        return json.loads(self.body).get("model")


@dataclass
class Upstream:
    """A server that answers requests with ``answer``, and what it got; ``names`` are its models."""

    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    names: tuple[str, ...] = ()
    answer: Handler | None = None
    waiting: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            assert request.path == "/v1/models"
            return web.json_response({"data": [{"id": name} for name in self.names]})
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append(Seen(request.path_qs, headers, await request.read()))
        return await self.answer(request) if self.answer else web.json_response(EMBEDDED)

    async def never(self, _: web.Request) -> web.StreamResponse:
        self.waiting += 1
        try:
            await asyncio.sleep(60)
        finally:
            self.waiting -= 1
        raise AssertionError

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None, None]:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self.handle)
        async with TestServer(app, handler_cancellation=True) as server:
            self.url = str(server.make_url("")).rstrip("/")
            yield


@asynccontextmanager
async def passing(
    where: Path, *kinds: str, embeds: bool = False, key: str = "", **options: Any
) -> AsyncGenerator[tuple[ScriptedServer, list[Upstream]], None]:
    """A server with a model for each of the ``kinds``, and their servers; ``embeds`` adds that of ``--embeddings``.

    The name of a model is its kind, of which others follow an underscore, and other names begin with ``my-``.
    """
    async with AsyncExitStack() as closing:
        upstreams = [Upstream(names=(kind,)) for kind in (*kinds, *["any"][: int(embeds)])]
        for each in upstreams:
            await closing.enter_async_context(each.serving())
        models = {
            name: {"kind": name.partition("_")[0], "engine": [each.url], "names": [f"my-{name}*"]}
            | keyed("engine", key)
            for name, each in zip(kinds, upstreams, strict=False)
        }
        own = {"embeddings": upstreams[-1].url} | keyed("embeddings", key) if embeds else {}
        settings = settings_of(models, **own)
        served = await closing.enter_async_context(
            running_server(ScriptedEngine(), where, resources=("passing",), settings=settings, **options)
        )
        yield served, upstreams


def settings_of(models: Mapping[str, Any], **own: Any) -> Settings:
    """Return the settings of these models, and of one that generates, which no request of these tests is for."""
    return Settings.model_validate({"models": {**models, "chat": {"engine": ["http://127.0.0.1:9"]}}, **own})


def keyed(name: str, key: str) -> dict[str, Any]:
    return {f"{name}_key": SecretStr(key)} if key else {}
