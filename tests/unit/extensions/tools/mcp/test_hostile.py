"""Hostile servers: they cannot redirect, delay or flood."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from penstock.extensions.tools.mcp.incoming import MOST_ASKED
from penstock.pipeline.protocol.tools import McpServer
from penstock.pipeline.secret import Secret
from penstock.services.tools import ServerUnavailable
from tests.support.mcp_messages import TOOL, Handle, Json, result, speaking
from tests.support.mcp_servers import PATIENT, MakeServers
from tests.support.tool_servers import web_server

pytestmark = pytest.mark.io

SECRET = "sk-header-secret-4714"


class Elsewhere:
    """A reachable server that no request names; it records the requests it gets."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path} {dict(request.headers)}")
        return web.json_response({})


@pytest.fixture
async def elsewhere() -> AsyncIterator[tuple[Elsewhere, str]]:
    server = Elsewhere()
    async with web_server(server.handle) as url:
        yield server, url


def _asks_for_a_login(url: str) -> Handle:
    async def handle(request: web.Request) -> web.StreamResponse:
        metadata = f'Bearer resource_metadata="{url}/.well-known/oauth-protected-resource", scope="all"'
        return web.Response(status=401, headers={"WWW-Authenticate": metadata})

    return handle


def _redirects(url: str) -> Handle:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": f"{url}/mcp"})

    return handle


def _posts_elsewhere(url: str) -> Handle:
    async def handle(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(f"event: endpoint\ndata: {url}/messages?session_id=1\n\n".encode())
        await asyncio.sleep(60)
        return stream

    return handle


@pytest.mark.parametrize(
    ("leads", "place"),
    [
        (_asks_for_a_login, "http://{}"),
        (_redirects, "http://{}"),
        (_redirects, "http://me:password@{}"),
        (_redirects, "file:///etc/passwd#"),
        (_posts_elsewhere, "http://{}"),
        (_posts_elsewhere, "http://127.0.0.1@{}"),
    ],
)
@pytest.mark.parametrize("over", ["mcp", "sse"])
async def test_server_cannot_redirect_elsewhere(
    make: MakeServers, elsewhere: tuple[Elsewhere, str], over: str, leads: Callable[[str], Handle], place: str
) -> None:
    other, url = elsewhere
    async with web_server(leads(place.format(url.removeprefix("http://")))) as hostile:
        server = McpServer("x", f"{hostile}/{over}", Secret({"Authorization": f"Bearer {SECRET}"}))
        with pytest.raises(ServerUnavailable) as raised:
            await make().tools(server, 0.7)
    assert other.requests == []
    assert SECRET not in str(raised.value)
    assert "password" not in str(raised.value)


async def test_endless_progress_does_not_delay_the_timeout(make: MakeServers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def call(request: web.Request, message: Json) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        received = {"progressToken": 1, "progress": 1, "message": f"so far {SECRET}"}
        progress = {"jsonrpc": "2.0", "method": "notifications/progress", "params": received}
        log = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "error", "data": SECRET}}
        while True:
            await stream.write(f"data: {json.dumps(progress)}\n\ndata: {json.dumps(log)}\n\n".encode() * 20)

    servers = make()
    async with web_server(speaking(call=call)) as hostile:
        server = McpServer("x", f"{hostile}/mcp")
        assert await servers.tools(server, PATIENT)
        session = servers.session(server)
        async with asyncio.timeout(120):
            outcome = await session.run("do", "{}", 0.3)
        await session.close()
    assert outcome.error == "The server did not answer within 0.3 seconds."
    assert SECRET not in caplog.text


DEEP: Json = functools.reduce(lambda inner, _: {"properties": {"a": inner}}, range(300), {})


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ([{**TOOL, "description": "x" * (3 << 20)}], "more tools than the limit"),
        ([{**TOOL, "name": f"do{number}"} for number in range(2001)], "2001 entries of tools, and 2000 are the most"),
        ([TOOL] * 30_000, "more than 15000 objects"),
        ([{**TOOL, "inputSchema": DEEP}], "recursion limit"),
    ],
    ids=["long", "many", "very many", "deep"],
)
async def test_listing_that_no_model_could_read_is_refused(make: MakeServers, tools: list[Json], reason: str) -> None:
    async with web_server(speaking(tools)) as hostile:
        with pytest.raises(ServerUnavailable, match=reason):
            await make().tools(McpServer("x", f"{hostile}/mcp"), PATIENT)


def in_one_body(answer: Json) -> web.StreamResponse:
    return web.json_response(answer)


def in_an_event(answer: Json) -> web.StreamResponse:
    return web.Response(text=f"data: {json.dumps(answer)}\n\n", content_type="text/event-stream")


@pytest.mark.parametrize("sent", [in_one_body, in_an_event])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "text", "text": "x"}] * 1_001, "1001 entries of content, and 1000 are the most"),
        ([{"type": "text", "text": "x"}] * 300_000, "more than 15000 objects"),
        ([{"type": "text", "text": "x", "_meta": {"n": [0] * 60_000}}], "or 50000 values"),
    ],
    ids=["many", "very many", "numbers"],
)
async def test_result_is_counted_before_it_is_converted(
    make: MakeServers, sent: Callable[[Json], web.StreamResponse], content: list[Json], reason: str
) -> None:
    async def call(request: web.Request, message: Json) -> web.StreamResponse:
        return sent(result(message, {"content": content}))

    servers = make()
    async with web_server(speaking(call=call)) as hostile:
        server = McpServer("x", f"{hostile}/mcp")
        assert await servers.tools(server, PATIENT)
        session = servers.session(server)
        outcome = await session.run("do", "{}", PATIENT)
        await session.close()
    assert reason in (outcome.error or "")


async def test_flood_of_requests_ends_the_connection(make: MakeServers) -> None:
    """Each request of a server takes a task and an answer, and it may send them without end."""
    answers = 0

    async def call(request: web.Request, message: Json) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        with contextlib.suppress(ConnectionError):
            for number in itertools.count():
                asked = {"jsonrpc": "2.0", "id": number, "method": "sampling/createMessage", "params": {}}
                await stream.write(f"data: {json.dumps(asked)}\n\n".encode())
        return stream

    handle = speaking(call=call)

    async def counted(request: web.Request) -> web.StreamResponse:
        nonlocal answers
        if request.method == "POST" and "method" not in await request.json():
            answers += 1
            return web.Response(status=202)
        return await handle(request)

    servers = make()
    async with web_server(counted) as hostile:
        server = McpServer("x", f"{hostile}/mcp")
        assert await servers.tools(server, PATIENT)
        session = servers.session(server)
        outcome = await session.run("do", "{}", PATIENT)
        await session.close()
    assert outcome.error is not None
    assert answers <= MOST_ASKED


async def test_tools_that_cannot_be_called_are_not_listed(make: MakeServers) -> None:
    """Neither the prompt nor the item has a tool twice, or one without a name that the model could write."""
    names = ["do", "do", "", "a\nb", "\x1b[31m", "x" * 129, "user-profile/update"]
    async with web_server(speaking([{**TOOL, "name": name} for name in names])) as hostile:
        tools = await make().tools(McpServer("x", f"{hostile}/mcp"), PATIENT)
    assert [tool.name for tool in tools] == ["do", "user-profile/update"]


@pytest.mark.parametrize("text", ["[1,1]," * 20_000, "a[i] = b;" * 16_000, '{"a": 1}\n' * 60_000, "1,2,3\n" * 60_000])
@pytest.mark.parametrize("sent", [in_one_body, in_an_event])
async def test_long_text_is_one_value(make: MakeServers, sent: Callable[[Json], web.StreamResponse], text: str) -> None:
    async def call(request: web.Request, message: Json) -> web.StreamResponse:
        return sent(result(message, {"content": [{"type": "text", "text": text}]}))

    servers = make()
    async with web_server(speaking(call=call)) as hostile:
        session = servers.session(McpServer("x", f"{hostile}/mcp"))
        outcome = await session.run("do", "{}", PATIENT)
        await session.close()
    assert (outcome.error, outcome.result) == (None, text)
