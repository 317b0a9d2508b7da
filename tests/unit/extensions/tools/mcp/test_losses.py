"""Broken connections and dead servers: running calls fail at once, and the next one works."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.pipeline.frames import McpError
from penstock.pipeline.protocol.tools import McpServer
from penstock.services.mcp_config import HttpServer, StdioServer
from penstock.services.tools import ServerUnavailable, Session, ToolResult
from tests.support.clock import Clock
from tests.support.mcp_servers import PATIENT, HttpServers, MakeServers, http_servers, stdio_server
from tests.support.processes import descendants

pytestmark = pytest.mark.io

CLOSED = {"type": "mcp_protocol_error", "code": -32000}


async def test_dead_child_is_restarted(make: MakeServers, tmp_path: Path) -> None:
    servers = make({"good": stdio_server()})
    await servers.tools(McpServer("good"), PATIENT)
    session = servers.session(McpServer("good"))
    hanging = asyncio.create_task(session.run("hang", "{}", PATIENT))
    marker = json.dumps({"marker": str(tmp_path / "written")})
    died = await session.run("fragile_write", marker, PATIENT)
    for outcome in (died, await asyncio.wait_for(hanging, PATIENT / 2)):
        assert outcome.error == "Connection closed"
        assert isinstance(outcome.data, McpError)
        assert CLOSED.items() <= outcome.data.error.items()
    assert await session.run("fragile_write", marker, PATIENT) == ToolResult("alive")
    marker = json.dumps({"marker": str(tmp_path / "read")})
    assert await session.run("fragile_read", marker, PATIENT) == ToolResult("alive")


async def test_program_that_never_answers_is_ended_with_the_server(make: MakeServers) -> None:
    before = descendants(os.getpid())
    servers = make({"silent": StdioServer("sleep", ("infinity",))})
    with pytest.raises(ServerUnavailable):
        await servers.tools(McpServer("silent"), 0.5)
    async with asyncio.timeout(PATIENT):
        await servers.close()
    assert not descendants(os.getpid()) - before


async def test_restarted_http_server_works_again(make: MakeServers) -> None:
    with http_servers() as http:
        servers = make({over: HttpServer(http.url(kind, over)) for kind, over in (("good", "mcp"), ("good", "sse"))})
        servers_by_handshake = make({"legacy": HttpServer(http.url("legacy"))})
        sessions = [servers.session(McpServer(over)) for over in ("mcp", "sse")]
        sessions.append(servers_by_handshake.session(McpServer("legacy")))
        for session in sessions:
            assert await session.run("add", '{"a": 1, "b": 2}', PATIENT) == ToolResult("3")
        http.kill()
        http.start()
        for session in sessions:  # a loss between calls is not noticed
            assert await session.run("add", '{"a": 1, "b": 2}', PATIENT) == ToolResult("3")
        hanging = [asyncio.create_task(session.run("hang", "{}", PATIENT)) for session in sessions]
        await begun(http, len(hanging))
        http.kill()
        for outcome in await asyncio.wait_for(asyncio.gather(*hanging), PATIENT / 2):
            assert isinstance(outcome.data, McpError)
            assert CLOSED.items() <= outcome.data.error.items()
        for session in sessions:
            assert (await session.run("add", '{"a": 1, "b": 2}', PATIENT)).error is not None
        http.start()
        for session in sessions:
            await well_again(session)


async def begun(http: HttpServers, calls: int) -> None:
    async with asyncio.timeout(PATIENT):
        while http.state().get("hang", 0) < calls:
            await asyncio.sleep(0.02)


async def well_again(session: Session) -> None:
    """Wait until a call succeeds; it may take a while, since attempts to connect are spaced out."""
    async with asyncio.timeout(PATIENT):
        while await session.run("add", '{"a": 1, "b": 2}', PATIENT) != ToolResult("3"):
            await asyncio.sleep(0.05)


class Forgetful:
    """A server with the older handshake that loses its first session when two calls have arrived in it."""

    def __init__(self) -> None:
        self.sessions = 0
        self._lost = asyncio.Barrier(2)

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [method("/mcp", self.refuse) for method in (web.get, web.delete)] + [web.post("/mcp", self.answer)]
        )
        return app

    async def refuse(self, request: web.Request) -> web.Response:
        return web.Response(status=405)

    async def answer(self, request: web.Request) -> web.Response:
        match message := await request.json():
            case {"method": "initialize"}:
                self.sessions += 1
                about = {"serverInfo": {"name": "forgetful", "version": "1"}, "capabilities": {}}
                return _answer(
                    message, about | {"protocolVersion": "2025-06-18"}, {"mcp-session-id": f"{self.sessions}"}
                )
            case {"method": "notifications/initialized"}:
                return web.Response(status=202)
            case {"method": "tools/call"} if request.headers["mcp-session-id"] == "1":
                await self._lost.wait()
                return web.Response(status=404)
            case {"method": "tools/call"}:
                return _answer(message, {"content": [{"type": "text", "text": "done"}]})
            case _:
                return web.Response(status=400)


def _answer(message: dict[str, Any], result: dict[str, Any], headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result}, headers=headers)


async def test_lost_session_is_reopened_once(make: MakeServers) -> None:
    forgetful = Forgetful()
    async with TestServer(forgetful.app(), host="127.0.0.1") as server:
        servers = make({"forgetful": HttpServer(str(server.make_url("/mcp")))})
        session = servers.session(McpServer("forgetful"))
        outcomes = await asyncio.gather(*(session.run("work", "{}", PATIENT) for _ in range(2)))
        assert outcomes == [ToolResult("done"), ToolResult("done")]
        assert forgetful.sessions == 2
        await servers.close()


async def test_dead_server_is_not_flooded(make: MakeServers, clock: Clock) -> None:
    """No time passes for the client, which would try again after a pause."""
    attempts = 0

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        servers = make({"down": HttpServer(f"http://127.0.0.1:{port}/mcp")})
        for _ in range(20):
            with pytest.raises(ServerUnavailable):
                await servers.tools(McpServer("down"), PATIENT)
        assert 0 < attempts <= 3


@pytest.mark.defect("30")
@pytest.mark.parametrize("over", ["mcp", "sse"])
async def test_closing_during_a_call_leaves_nothing_open(over: str, make: MakeServers, http: HttpServers) -> None:
    servers = make({"ours": HttpServer(http.url("good", over))})
    sessions = [servers.session(McpServer("ours")), servers.session(McpServer("x", http.url("good", over)))]
    before = http.state().get("hang", 0)
    calls = [asyncio.create_task(session.run("hang", "{}", PATIENT)) for session in sessions]
    await begun(http, before + 2)
    await asyncio.create_task(servers.close())
    for outcome in await asyncio.wait_for(asyncio.gather(*calls), PATIENT / 2):
        assert isinstance(outcome.data, McpError)
        assert CLOSED.items() <= outcome.data.error.items()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_closing_does_not_wait_for_a_mute_server(make: MakeServers, http: HttpServers) -> None:
    servers = make()
    session = servers.session(McpServer("x", http.url("mute")))
    before = http.state()["requests"].get("POST /mute/mcp", 0)
    call = asyncio.create_task(session.run("echo", "{}", PATIENT))
    async with asyncio.timeout(PATIENT):
        while http.state()["requests"].get("POST /mute/mcp", 0) == before:
            await asyncio.sleep(0.02)
    async with asyncio.timeout(PATIENT / 2):
        await session.close()
        assert (await call).error == "The connection to the server is closed."
