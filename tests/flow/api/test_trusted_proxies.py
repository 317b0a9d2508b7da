"""What a server makes of the headers of a proxy that it trusts: in its log, its limits, its names and its URLs."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from penstock.api.http.auth import Keys
from penstock.api.http.connections import ConnectionBounds
from penstock.api.http.origins import Origins
from penstock.api.http.proxies import Proxies
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import wait_until
from tests.support.server import ENDLESS, PacedEngine, ScriptedServer, running_server, script
from tests.support.socket_client import connected

NAME = "llm.example.com"
ALICE = {"X-Forwarded-For": "203.0.113.5"}
BOB = {"X-Forwarded-For": "203.0.113.6"}
LOCAL = Proxies.parse(["127.0.0.0/8"])


@pytest.fixture
async def behind(tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    """A server without keys that is called ``llm.example.com``, behind a proxy of this machine."""
    origins = Origins([NAME])
    async with running_server(ScriptedEngine(script()), tmp_path, proxies=LOCAL, origins=origins) as server:
        yield server


def clients(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """The client in each line of the access log, as a field and in its text."""
    records = [record for record in caplog.records if record.name == "penstock.api.http.access_log"]
    return [(vars(record)["client"], re.findall(r" \(([^,]+), ", record.getMessage())[0]) for record in records]


async def test_log_names_the_client_behind_a_trusted_proxy(
    behind: ScriptedServer, served: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for server in (behind, served):
            async with server.client.get(
                f"{server.url}/v1/models", headers={"X-Forwarded-For": "6.6.6.6, 2001:db8::7"}
            ):
                pass
        async with connected(behind, headers=ALICE) as socket:
            await socket.create(input="Hi")
    assert clients(caplog) == [
        ("2001:db8::7", "2001:db8::7"),
        ("127.0.0.1", "127.0.0.1"),
        ("203.0.113.5", "203.0.113.5"),
        ("203.0.113.5", "203.0.113.5"),
    ]


async def test_requests_through_a_proxy_are_limited_by_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy itself may have more connections than one client."""
    monkeypatch.setattr(ConnectionBounds, "within", lambda _: ConnectionBounds(per_client=2, in_use=100_000))
    engine = PacedEngine(script(ENDLESS))
    engine.hold(1)
    async with running_server(engine, tmp_path, proxies=LOCAL) as server, AsyncExitStack() as closing:

        async def begin(headers: dict[str, str]) -> int:
            body = {"input": "Hi", "stream": True}
            sent = server.client.post(f"{server.url}/v1/responses", json=body, headers=headers)
            return (await closing.enter_async_context(sent)).status

        assert [await begin(ALICE) for _ in range(3)] == [200, 200, 429]
        assert [await begin(BOB) for _ in range(3)] == [200, 200, 429]
        async with server.client.get(f"{server.url}/v1/models", headers=ALICE) as refused:
            error = (await refused.json())["error"]
            assert (error["code"], refused.headers["Retry-After"]) == ("rate_limit_exceeded", "1")
            assert "203.0.113.5 has 2 requests at once" in error["message"]
        engine.say_all()
        await closing.aclose()
        await wait_until(lambda: engine.running == 0)
        async with asyncio.timeout(120):
            while (await _status(server, ALICE)) == 429:
                await asyncio.sleep(0.01)


async def _status(server: ScriptedServer, headers: dict[str, str]) -> int:
    async with server.client.get(f"{server.url}/v1/models", headers=headers) as answer:
        return answer.status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X-Forwarded-Host": NAME}, 200),
        ({"X-Forwarded-Host": f"{NAME}:8443", "Origin": f"https://{NAME}:8443"}, 200),
        ({"Host": NAME, "Origin": f"https://{NAME}"}, 200),
        ({"X-Forwarded-Host": NAME, "Origin": "https://evil.example"}, 403),
        ({"X-Forwarded-Host": NAME, "Host": "evil.example"}, 403),
        ({"X-Forwarded-Host": "evil.example"}, 403),
        ({"X-Forwarded-Host": "evil.example", "Origin": "https://evil.example"}, 403),
        ({"X-Forwarded-Host": "[::1"}, 403),
    ],
)
async def test_name_that_the_client_used_is_checked(
    behind: ScriptedServer, headers: dict[str, str], status: int
) -> None:
    assert await _status(behind, headers) == status


async def test_host_of_a_stranger_is_not_read(tmp_path: Path) -> None:
    proxies, origins = Proxies.parse(["10.0.0.0/8"]), Origins([NAME])
    async with running_server(ScriptedEngine(script()), tmp_path, proxies=proxies, origins=origins) as server:
        assert await _status(server, {"X-Forwarded-Host": NAME, "Origin": f"https://{NAME}"}) == 403


async def test_urls_begin_with_the_prefix_that_the_proxy_removes(behind: ScriptedServer) -> None:
    headers = {"X-Forwarded-Prefix": "/llm"}
    async with behind.client.get(f"{behind.url}/openapi.json", headers=headers) as answer:
        assert (await answer.json())["servers"] == [{"url": "/llm"}]
    async with behind.client.get(f"{behind.url}/", headers=headers) as answer:
        assert "POST /llm/v1/responses " in await answer.text()
    async with behind.client.get(f"{behind.url}/v1/nothing", headers=headers) as answer:
        assert "GET /llm/openapi.json" in (await answer.json())["error"]["message"]


async def test_prefix_of_a_stranger_is_not_read(served: ScriptedServer) -> None:
    async with served.client.get(f"{served.url}/openapi.json", headers={"X-Forwarded-Prefix": "/llm"}) as answer:
        assert (await answer.json())["servers"] == [{"url": "/"}]


async def test_proxy_does_not_replace_a_key(tmp_path: Path) -> None:
    keys = Keys(given=["a-key-of-sixteen-or-more"])
    async with running_server(ScriptedEngine(script()), tmp_path, keys=keys, proxies=LOCAL) as server:
        assert await _status(server, ALICE) == 401
