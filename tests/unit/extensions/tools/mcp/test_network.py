"""Servers of requests are reached at permitted addresses only."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import httpcore2
import httpx2
import pytest

from penstock.extensions.tools.mcp.network import GuardedBackend, http_client
from penstock.pipeline.protocol.tools import McpServer
from penstock.services.foreign import LARGEST_BYTES
from penstock.services.mcp_config import HttpServer
from penstock.services.tools import ServerUnavailable
from penstock.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks, Blocked
from tests.support.mcp_servers import LOCAL, PATIENT, HttpServers, MakeServers
from tests.support.tool_servers import answering

pytestmark = pytest.mark.io

REFUSED = "The server's address is neither public nor allowed (--allow-address)."


async def ignored(_: httpx2.Response) -> None:
    """Ignore the response."""


async def test_private_server_of_a_request_is_not_reached(make: MakeServers, http: HttpServers) -> None:
    servers = make(allowed=NOTHING_ALLOWED)
    before = http.state()["requests"]
    for host in ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "2130706433", "127.1", "0x7f.1"):
        for over in ("mcp", "sse"):
            url = http.url("good", over).replace("127.0.0.1", host)
            with pytest.raises(ServerUnavailable, match=re.escape(REFUSED)):
                await servers.tools(McpServer("x", url), PATIENT)
    refused = await servers.session(McpServer("x", http.url())).run("echo", "{}", PATIENT)
    assert refused.error == REFUSED
    assert http.state()["requests"] == before


async def test_configured_and_allowed_servers_are_reached(make: MakeServers, http: HttpServers) -> None:
    """A configured server may be anywhere, one of a request at allowed addresses and names."""
    assert await make({"ours": HttpServer(http.url())}, NOTHING_ALLOWED).tools(McpServer("ours"), PATIENT)
    named = http.url().replace("127.0.0.1", "localhost")
    assert await make(allowed=AllowedNetworks.parse(["localhost"])).tools(McpServer("x", named), PATIENT)
    with pytest.raises(ServerUnavailable, match=re.escape(REFUSED)):
        await make(allowed=AllowedNetworks.parse(["other"])).tools(McpServer("x", named), PATIENT)


async def test_redirects_are_guarded(make: MakeServers, http: HttpServers) -> None:
    inside = http.url().replace("127.0.0.1", "127.0.0.2")
    servers = make()
    with pytest.raises(ServerUnavailable, match="not followed"):
        await servers.tools(McpServer("x", f"{http.url('away')}?to={inside}"), PATIENT)
    async with http_client({}, ignored, LOCAL) as client:
        with pytest.raises(httpx2.ConnectError) as raised:
            await client.get(f"{http.url('away')}?to={inside}", follow_redirects=True)
    assert "127.0.0.2 is not public" in str(raised.value)


class Rebinding(asyncio.SelectorEventLoop):
    """A loop in whose DNS every name means something else each time: first a public address, then this machine."""

    def __init__(self) -> None:
        super().__init__()
        self.lookups = 0
        self.connected: list[Any] = []

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        if host != "rebound.example":
            return await super().getaddrinfo(host, port, **_)
        self.lookups += 1
        address = "93.184.216.34" if self.lookups % 2 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        self.connected.append(address[0])
        raise ConnectionRefusedError


def in_loop(loop: Rebinding, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(work())


def test_name_is_resolved_once() -> None:
    loop = Rebinding()

    async def connect() -> None:
        backend = GuardedBackend(NOTHING_ALLOWED)
        with pytest.raises(httpcore2.ConnectError) as first:
            await backend.connect_tcp("rebound.example", 80, 1.0)
        assert not isinstance(first.value.__cause__, Blocked)
        with pytest.raises(httpcore2.ConnectError) as second:
            await backend.connect_tcp("rebound.example", 80, 1.0)
        assert isinstance(second.value.__cause__, Blocked)

    in_loop(loop, connect)
    assert loop.lookups == 2
    assert loop.connected == ["93.184.216.34"]


async def test_answers_are_bounded() -> None:
    endless = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
    too_much = (endless, *[b" " * 2**20] * (LARGEST_BYTES // 2**20 + 1))
    async with answering(*too_much) as port, http_client({}, ignored, LOCAL) as client:
        with pytest.raises(httpx2.StreamError, match="more than"):
            await client.get(f"http://127.0.0.1:{port}/")
    packed = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nab"
    async with answering(packed) as port, http_client({}, ignored, LOCAL) as client:
        with pytest.raises(httpx2.DecodingError):
            await client.get(f"http://127.0.0.1:{port}/")
