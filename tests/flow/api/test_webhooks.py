"""Webhooks of servers that are killed: no end of a background response is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from penstock.api.cli.command_line import read_settings
from penstock.api.http.api_key import digest_of
from penstock.api.http.key_sources import UnusableKeys
from penstock.server import running
from penstock.services.standard_webhooks import Signer
from tests.support.api_clients import openai_client, wait_until
from tests.support.server_process import WEBHOOK_SECRET, ServerProcess, serve_with_webhooks, serving_process
from tests.support.stores import both_if_thorough, wait_until_stored
from tests.support.tool_servers import web_server

KNOWN = ("--heartbeat", "0.2", "--stale-after", "2", "--no-sandbox", "--allow-address", "127.0.0.1")


async def begin(server: ServerProcess) -> str:
    async with openai_client(server.url) as client:
        response: Any = await client.responses.create(input="Hi", background=True)
        return str(response.id)


async def status(server: ServerProcess, response_id: str) -> str:
    async with openai_client(server.url) as client:
        response: Any = await client.responses.retrieve(response_id)
        return str(response.status)


async def ended(server: ServerProcess, response_id: str) -> str:
    async with asyncio.timeout(120):
        while (now := await status(server, response_id)) in {"queued", "in_progress"}:
            await asyncio.sleep(0.05)
    return now


@both_if_thorough
async def test_webhooks_outlive_their_server(store_at: str, tmp_path: Path) -> None:
    """A server is killed while the receiver is down, and again in the middle of a delivery."""
    client = openai.OpenAI(api_key="none", webhook_secret=WEBHOOK_SECRET)
    got: list[Any] = []
    state = {"answers": "refuse"}
    gate = asyncio.Event()

    async def take(request: web.Request) -> web.Response:
        event = client.webhooks.unwrap(await request.read(), dict(request.headers))
        got.append(event)
        if state["answers"] == "hang":
            await gate.wait()
        return web.Response(status=503 if state["answers"] == "refuse" else 204)

    async with web_server(take) as receiver:
        options = ("quick", *KNOWN, "--webhook", f"{receiver}/hook")
        async with serving_process(serve_with_webhooks, options, store_at, tmp_path) as server:
            first = await begin(server)
            assert await ended(server, first) == "completed"
            await wait_until(lambda: len(got) >= 2)  # refused, and tried again
            await server.kill()
            state["answers"] = "hang"
            before = len(got)
            await server.start()
            await wait_until(lambda: len(got) > before)
            await server.kill()  # the receiver may have taken it, or not
            state["answers"] = "take"
            gate.set()
            before = len(got)
            await server.start()
            await wait_until(lambda: len(got) > before)
            async with openai_client(server.url) as api:
                running = await api.responses.create(input="Hi", background=True)
                await api.responses.cancel(running.id)
            await wait_until(lambda: got[-1].data.id == running.id)
            assert await ended(server, running.id) in {"completed", "cancelled"}
            kept = await status(server, running.id)
    assert {event.id for event in got if event.data.id == first} == {f"evt_{first.removeprefix('resp_')}"}
    assert {event.type for event in got if event.data.id == first} == {"response.completed"}
    assert [event.type for event in got if event.data.id == running.id] == [f"response.{kept}"]


@both_if_thorough
async def test_orphan_that_another_server_ends_is_announced(store_at: str, tmp_path: Path) -> None:
    client = openai.OpenAI(api_key="none", webhook_secret=WEBHOOK_SECRET)
    got: list[Any] = []

    async def take(request: web.Request) -> web.Response:
        got.append(client.webhooks.unwrap(await request.read(), dict(request.headers)))
        return web.Response()

    async with web_server(take) as receiver:
        options = ("long", *KNOWN, "--webhook", receiver)
        async with serving_process(serve_with_webhooks, options, store_at, tmp_path) as server:
            response_id = await begin(server)
            await wait_until_stored(store_at, response_id, 5)
            await server.kill()
            assert got == []
            await server.start()
            await wait_until(lambda: got)
    (event,) = got
    assert (event.type, event.data.id) == ("response.failed", response_id)


async def test_key_has_a_receiver_of_its_own(tmp_path: Path) -> None:
    got: list[tuple[bytes, dict[str, str]]] = []

    async def take(request: web.Request) -> web.Response:
        got.append((await request.read(), dict(request.headers)))
        return web.Response()

    key = "sk-alice-0123456789"
    keys = tmp_path / "keys"
    async with web_server(take) as receiver:
        keys.write_text(f"{key} name=alice webhook={receiver}\nsk-bob-0123456789\n")
        options = ("quick", *KNOWN, "--api-key-file", str(keys))
        async with serving_process(serve_with_webhooks, options, str(tmp_path / "store"), tmp_path) as server:
            for each in ("sk-bob-0123456789", key):
                async with openai_client(server.url, each) as api:
                    response: Any = await api.responses.create(input="Hi", background=True)
            await wait_until(lambda: got)
    secret = Signer.of(WEBHOOK_SECRET).of_owner(digest_of(key)).secrets
    ((body, headers),) = got
    event: Any = openai.OpenAI(api_key="none", webhook_secret=secret).webhooks.unwrap(body, headers)
    assert event.data.id == response.id


async def test_webhook_of_a_key_needs_a_secret(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-alice-0123456789 webhook=https://a.example/\n")
    with pytest.raises(UnusableKeys, match="PENSTOCK_WEBHOOK_SECRET"):
        async with running(read_settings(["--api-key-file", str(keys), "--store", str(tmp_path / "store")])):
            pass


@pytest.mark.parametrize(
    ("options", "secret", "mistake"),
    [
        (("--webhook", "https://a.invalid"), None, "PENSTOCK_WEBHOOK_SECRET"),
        (("--webhook", "a.invalid"), "s", "no URL of a receiver"),
        (("--webhook", "https://a.invalid"), "whsec_%", "base64"),
        (("--webhook", "https://a.invalid", "--store", "none"), "s", "--webhook needs a store"),
    ],
)
def test_wrong_settings_end_the_start(
    options: tuple[str, ...], secret: str | None, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if secret:
        monkeypatch.setenv("PENSTOCK_WEBHOOK_SECRET", secret)
    with pytest.raises(Exception, match=mistake):
        read_settings(list(options))
