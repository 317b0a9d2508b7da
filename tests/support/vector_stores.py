"""Servers with vector stores and a model that searches in files; a server that embeds by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.api.cli.command_line import read_settings
from penstock.extensions.tools.files.stored_files import StoredFiles
from penstock.extensions.tools.search.embedder import Embedder
from penstock.extensions.tools.search.searcher import Searcher
from penstock.extensions.tools.search.session import FileSearchHost
from penstock.services.store.store import Store
from penstock.services.tools import Toolbox
from tests.support.api_clients import PATIENCE
from tests.support.server import ScriptedServer
from tests.support.stores import open_store
from tests.support.tool_servers import tool_server

Json = dict[str, Any]

DOCUMENTS: Mapping[str, str] = {
    "moon.txt": "The moon has no air. Its craters are old, and the moon is cold at night.",
    "tea.md": "# Tea\n\nGreen tea is steeped for two minutes. Black tea takes longer.",
    "水果.txt": "苹果是一种水果。北京的冬天很冷。",
}


def search_markup(*queries: str) -> str:
    arguments = json.dumps({"queries": queries}, ensure_ascii=False)
    return f"<|channel|>analysis to=file_search.search code<|message|>{arguments}<|call|>"


def file_search(*stores: str, **fields: Any) -> Json:
    """A file search in a request."""
    return {"type": "file_search", "vector_store_ids": list(stores), **fields}


async def uploaded(store: Store, filename: str, content: str | bytes, owner: str = "") -> str:
    """Upload a file, and return its id."""
    async with store.part(StoredFiles).uploading(owner) as upload:
        await upload.write(content.encode() if isinstance(content, str) else content)
        return (await upload.finish(filename, "assistants")).id


@asynccontextmanager
async def search_server(
    where: str, turns: Sequence[str] = (), *, embeddings: str = "", **options: Any
) -> AsyncGenerator[ScriptedServer, None]:
    """Serve vector stores over a value of ``--store``, with a model that writes ``turns`` and may search in files."""
    settings = read_settings(["--embeddings", embeddings] if embeddings else [])
    async with AsyncExitStack() as closing:
        store = await closing.enter_async_context(open_store(where))
        embedder = Embedder(embeddings) if embeddings else None
        toolbox = Toolbox({"file_search": FileSearchHost(Searcher(store, embedder), embedder)})
        yield await closing.enter_async_context(
            tool_server(where, turns, toolbox=toolbox, resources=("vector_stores",), settings=settings, **options)
        )


async def new_store(served: ScriptedServer, files: Sequence[str] = (), **fields: Any) -> Json:
    """Create a vector store, and return it once its files are read."""
    status, made = await served.post({"file_ids": list(files), **fields}, "/v1/vector_stores")
    assert status == 200, made
    async with asyncio.timeout(PATIENCE):
        while made["status"] == "in_progress":
            await asyncio.sleep(0.02)
            _, made = await served.get(f"/v1/vector_stores/{made['id']}")
    return dict(made)


@dataclass
class Embeddings:
    """A server of embeddings, with one number for each topic: how many of its words a text has."""

    topics: Sequence[Sequence[str]]
    is_down: bool = False
    url: str = ""

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "topics"}]})

    async def embed(self, request: web.Request) -> web.Response:
        if self.is_down:
            return web.json_response({}, status=503)
        texts = (await request.json())["input"]
        vectors = [[sum(map(text.lower().count, topic)) + 1e-3 for topic in self.topics] for text in texts]
        data = [{"index": at, "object": "embedding", "embedding": vector} for at, vector in enumerate(vectors)]
        return web.json_response({"object": "list", "data": data[::-1], "model": "topics"})


@asynccontextmanager
async def embedding_server(*topics: Sequence[str]) -> AsyncGenerator[Embeddings, None]:
    """Serve embeddings for the length of the block."""
    embeddings, app = Embeddings(topics), web.Application()
    app.add_routes([web.get("/v1/models", embeddings.models), web.post("/v1/embeddings", embeddings.embed)])
    async with TestServer(app) as server:
        embeddings.url = f"http://{server.host}:{server.port}"
        yield embeddings
