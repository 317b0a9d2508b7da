"""Penstock behind real proxies, as deploy/proxies configures them: streams, sockets, bodies, names, and no server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.api.http.origins import Origins
from penstock.api.http.proxies import Proxies
from penstock.pipeline.protocol.events import ResponseCompleted
from tests.support.api_clients import JSON, ApiClient, wait_until
from tests.support.event_streams import read_sse
from tests.support.proxies import CLIENT, NAME, UNPACKED, running_proxy
from tests.support.server import ENDLESS, PacedEngine, PacedServer, running_server, script
from tests.support.socket_client import connected

LARGEST = 32 * 2**20
BEGUN = 6
"""Chunks after which a message has begun."""
PREFIXES = ("", "/llm")


@dataclass
class Behind:
    """A server behind a proxy."""

    server: PacedServer
    proxy: ApiClient

    def under(self, prefix: str) -> ApiClient:
        return ApiClient(self.proxy.url + prefix, self.proxy.client)


@pytest.fixture(params=UNPACKED)
async def behind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Behind, None]:
    folder = tmp_path / "proxy"
    folder.mkdir()
    options: dict[str, Any] = {
        "origins": Origins([NAME]),
        "proxies": Proxies.parse(["127.0.0.1"]),
        "max_body_bytes": LARGEST,
    }
    async with (
        running_server(PacedEngine(script(ENDLESS)), tmp_path, **options) as server,
        running_proxy(request.param, server.url, folder) as proxy,
    ):
        async with asyncio.timeout(120):
            while (await proxy.client.get(f"{proxy.url}/ready")).status != 200:  # its first look at the server
                await asyncio.sleep(0.1)
        yield Behind(server, proxy)


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_events_of_a_stream_arrive_one_by_one(behind: Behind, prefix: str) -> None:
    engine = behind.server.engine
    engine.hold(BEGUN)
    async with behind.under(prefix).open_stream() as stream:
        for number in range(BEGUN, BEGUN + 6):  # each chunk is an event, up to here
            await stream.upto(b'"sequence_number":%d,' % number)
            engine.say(1)
        engine.say_all()
        whole = await stream.rest()
    assert isinstance(read_sse(whole)[-1], ResponseCompleted)


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_websocket_passes(behind: Behind, prefix: str) -> None:
    engine = behind.server.engine
    async with connected(behind.under(prefix)) as socket:
        for _ in range(2):
            assert (await socket.create(input="Hi")).status == "completed"
        engine.hold(BEGUN)
        await socket.send(type="response.create", input="Hi", model="tiny")
        while (await socket.frame())["type"] != "response.output_text.delta":
            pass
    await wait_until(lambda: engine.running == 0)


async def test_client_may_choose_the_id_of_its_request(behind: Behind) -> None:
    client, url = behind.proxy.client, f"{behind.proxy.url}/v1/models"
    async with client.get(url, headers={"X-Request-Id": "mine-1"}) as answer:
        assert answer.headers["X-Request-Id"] == "mine-1"
    ids = set()
    for _ in range(2):
        async with client.get(url) as answer:
            ids.add(answer.headers["X-Request-Id"])
    assert len(ids) == 2
    assert all(len(each) >= 32 for each in ids)


async def test_client_that_leaves_aborts_the_engine(behind: Behind) -> None:
    behind.server.engine.hold(BEGUN)
    async with behind.proxy.open_stream() as stream:
        await stream.upto(b"response.output_text.delta")
        assert behind.server.engine.running == 1
    await wait_until(lambda: behind.server.engine.running == 0)


async def test_bodies_up_to_the_limit_of_the_server_pass(behind: Behind) -> None:
    async def answer_to(size: int) -> tuple[int, Any]:
        body = b'{"input": "Hi", "x_filler": "%s"}'
        sent = BytesIO(body % (b"a" * (size - len(body) + 2)))
        async with behind.proxy.client.post(f"{behind.proxy.url}/v1/responses", data=sent, headers=JSON) as answer:
            return answer.status, await answer.json()

    assert (await answer_to(LARGEST))[0] == 200
    status, refusal = await answer_to(LARGEST + 1)
    assert (status, refusal["error"]["type"]) == (413, "invalid_request_error")


async def test_log_has_the_address_of_the_client(behind: Behind, caplog: pytest.LogCaptureFixture) -> None:
    forged = {"X-Forwarded-For": "6.6.6.6, 127.0.0.1", "Forwarded": "for=6.6.6.6"}
    with caplog.at_level(logging.INFO):
        async with behind.proxy.client.get(f"{behind.proxy.url}/v1/models", headers=forged) as answer:
            assert answer.status == 200
    assert {vars(record)["client"] for record in caplog.records if hasattr(record, "client")} == {CLIENT}


async def test_pages_of_the_name_may_use_the_server(behind: Behind) -> None:
    async def status(origin: str, **headers: str) -> int:
        async with behind.proxy.client.get(
            f"{behind.proxy.url}/v1/models", headers={"Origin": origin, **headers}
        ) as answer:
            return answer.status

    assert await status(behind.proxy.url) == 200
    assert await status("https://evil.example") == 403
    assert await status("https://evil.example", **{"X-Forwarded-Host": "evil.example"}) == 403


async def test_url_of_the_description_has_the_prefix(behind: Behind) -> None:
    for prefix in PREFIXES:
        forged = {"X-Forwarded-Prefix": "/forged"}
        async with behind.proxy.client.get(f"{behind.proxy.url}{prefix}/openapi.json", headers=forged) as answer:
            assert (await answer.json())["servers"] == [{"url": prefix or "/"}]


async def test_id_of_a_stored_response_passes(behind: Behind) -> None:
    status, created = await behind.proxy.post({"input": "Hi"})
    assert status == 200
    assert await behind.under("/llm").get(f"/v1/responses/{created['id']}") == (200, created)
    assert await behind.proxy.delete(f"/v1/responses/{created['id']}?x=%2F") == (
        200,
        {"id": created["id"], "object": "response", "deleted": True},
    )


@pytest.mark.parametrize("name", UNPACKED)
async def test_server_that_is_away_is_an_error_that_clients_try_again(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "proxy"
    folder.mkdir()
    async with running_server(PacedEngine(script(ENDLESS)), tmp_path) as server:
        url = server.url
    async with running_proxy(name, url, folder) as proxy:
        for method, path in (("POST", "/v1/responses"), ("GET", "/llm/v1/models")):
            async with proxy.client.request(method, proxy.url + path) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
                assert answer.content_type == "application/json"
                error = (await answer.json())["error"]
                assert (error["code"], error["message"]) == (
                    "server_unreachable",
                    "The server is away. Try again later.",
                )


async def test_refusal_of_the_server_is_not_replaced(behind: Behind) -> None:
    """Its errors say more than those of the proxy."""
    behind.server.scheduler.in_flight.stopping = True
    async with behind.proxy.client.get(f"{behind.proxy.url}/ready") as answer:
        assert (answer.status, await answer.json()) == (
            503,
            {"status": "not ready", "reasons": ["The server is stopping."]},
        )


async def test_client_names_another_server(behind: Behind) -> None:
    """No proxy passes a request for a foreign name on, or the server refuses it."""
    try:
        async with behind.proxy.client.get(f"{behind.proxy.url}/v1/models", headers={"Host": "evil.example"}) as answer:
            assert "data" not in await answer.text()
    except aiohttp.ClientError:
        pass
