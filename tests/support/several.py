"""A server of several models in process, each over an engine that a test holds."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.test_utils import TestServer

from penstock import server
from penstock.api.runs.scheduler import Scheduler
from penstock.api.settings import Settings
from tests.support.api_clients import ApiClient, Json
from tests.support.server import PacedEngine, script

ENGINE = "tests.support.several"

MADE: dict[str, Callable[[], PacedEngine]] = {}
"""Makes the engine of each model of the server of a test."""


def says(text: str, *models: str, context_length: int = 131_072, **options: Any) -> PacedEngine:
    """An engine that always says a text, and knows itself by these names."""
    told = script(f"<|channel|>final<|message|>{text}<|return|>", **options)
    return PacedEngine(told, models=models or ("upstream",), context_length=context_length)


def __getattr__(name: str) -> Callable[[object], PacedEngine]:
    """Return the function that makes the engine of a model, for ``--engine``."""
    if name not in MADE:
        raise AttributeError(name)
    return lambda _: MADE[name]()


@dataclass
class SeveralServer(ApiClient):
    """A client of a server of several models, with their engines by name."""

    scheduler: Scheduler
    engines: dict[str, PacedEngine]
    settings: Settings
    opened: list[str] = field(default_factory=list)
    """The models in the order in which they were opened."""

    async def says(self, model: str | None, **body: Any) -> str:
        """Create a response, and return its text."""
        named = {} if model is None else {"model": model}
        status, answer = await self.post({"input": "Hi", **named, **body})
        assert status == 200, answer
        return text_of(answer)


def text_of(response: Json) -> str:
    """Return the text of a response."""
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


@asynccontextmanager
async def several_models(
    folder: Path, engines: Mapping[str, PacedEngine], tables: Mapping[str, Json] | None = None, **settings: Any
) -> AsyncGenerator[SeveralServer, None]:
    """Serve a model over each of the ``engines`` for the length of a block.

    ``tables`` has more of their settings, and other models.
    """
    opened = list[str]()

    def maker(name: str) -> Callable[[], PacedEngine]:
        def make() -> PacedEngine:
            opened.append(name)
            return engines[name]

        return make

    MADE.update({name: maker(name) for name in engines})
    models: dict[str, Any] = {name: {"engine": [f"{ENGINE}:{name}"]} for name in engines}
    for name, table in (tables or {}).items():
        models[name] = models.get(name, {}) | table
    own = Settings(
        store=settings.pop("store", str(folder / "store.sqlite3")),
        sandbox=False,
        models=models,
        **settings,
    )
    async with AsyncExitStack() as closing:
        running = await closing.enter_async_context(server.running(own))
        closing.push_async_callback(running.scheduler.drain, 0)
        http = await closing.enter_async_context(TestServer(running.api.app(own.max_body_bytes)))
        client = await closing.enter_async_context(aiohttp.ClientSession())
        url = str(http.make_url("")).rstrip("/")
        yield SeveralServer(url, client, running.scheduler, dict(engines), own, opened)
