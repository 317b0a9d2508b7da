"""Secrets of the settings go to the servers that they are for, whatever these answer, and nowhere else."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.api_clients import wait_until
from tests.support.broken_http import BROKEN, Answers, answering
from tests.support.server_process import SECRETS, WEBHOOK_SECRET, ServerProcess, serve_with_secrets, serving_process
from tests.support.stores import stored_text

pytestmark = [pytest.mark.io, pytest.mark.slow]

MCP_SECRET = "canary-mcp"
SENT = ("canary-embeddings", "canary-otlp", MCP_SECRET)
"""Secrets that the other servers must have been sent, so that they can have them repeated."""


async def used(server: ServerProcess) -> str:
    """Have every other server asked for something; return all that a client reads of it."""
    read: list[Any] = []
    form = aiohttp.FormData({"purpose": "assistants"})
    form.add_field("file", b"The moon has no air.", filename="moon.txt")
    async with server.client.post(f"{server.url}/v1/files", data=form) as answer:
        file = await answer.json()
    _, made = await server.post({"file_ids": [file["id"]]}, "/v1/vector_stores")
    place = f"/v1/vector_stores/{made['id']}"
    while (await server.get(place))[1]["status"] == "in_progress":
        await asyncio.sleep(0.02)
    read += [await server.get(f"{place}/files"), await server.get(f"{place}/files/{file['id']}")]
    read.append(await server.post({"query": "moon"}, f"{place}/search"))
    async with server.client.post(f"{server.url}/v1/embeddings", json={"input": "moon"}) as answer:
        try:
            read.append((dict(answer.headers), await answer.text()))
        except (aiohttp.ClientError, UnicodeDecodeError) as error:
            read.append(repr(error.args))
    maps = {"type": "mcp", "server_label": "maps", "require_approval": "never"}
    for fields in ({"tools": [maps, {"type": "web_search"}], "stream": True}, {"background": True}):
        async with server.client.post(f"{server.url}/v1/responses", json={"input": "Hi", **fields}) as answer:
            read.append(await answer.text())
    return json.dumps(read, default=str)


async def test_no_secret_of_the_settings_is_told(tmp_path: Path) -> None:
    store = str(tmp_path / "store" / "responses.sqlite3")
    Path(store).parent.mkdir()
    async with answering(b"") as upstream:
        servers = {"maps": {"type": "http", "url": upstream.url, "headers": {"Authorization": f"Bearer {MCP_SECRET}"}}}
        config = tmp_path / "mcp.json"
        config.write_text(json.dumps({"mcpServers": servers}))
        options = ["--embeddings", upstream.url, "--web-search", f"searxng={upstream.url}", "--webhook", upstream.url]
        options += ["--allow-address", "127.0.0.1", "--mcp-config", str(config), "--no-sandbox", "--log-level", "DEBUG"]
        arguments = (upstream.url, "quick", "--allow-tool", "web_search", *options)
        read = ""
        async with serving_process(serve_with_secrets, arguments, store, tmp_path) as server:
            for answer in BROKEN.values():
                upstream.answers = [answer]
                read += await used(server)
            await _all_is_sent(upstream)
        log = server.log.read_text(errors="replace")
        kept = await stored_text(store)
    for secret in (*(value.rpartition("=")[2] for value in SECRETS.values()), MCP_SECRET, WEBHOOK_SECRET):
        assert [name for name, text in (("answers", read), ("log", log), ("store", kept)) if secret in text] == []
    assert "met a bug" not in log


async def _all_is_sent(upstream: Answers) -> None:
    """Wait until every secret has been sent; traces and webhooks are sent later."""
    await wait_until(lambda: all(secret.encode() in upstream.received for secret in SENT))
    await wait_until(lambda: b"webhook-signature" in upstream.received.lower())
