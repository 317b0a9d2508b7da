"""The additions of MCP's revision 2026-07-28: headers of arguments, results that ask for input, types of results."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from penstock.pipeline.frames import McpError
from penstock.pipeline.protocol.tools import McpServer
from penstock.services.mcp_config import HttpServer
from penstock.services.tools import ToolResult
from tests.support.mcp_servers import PATIENT, MakeServers
from tests.support.tool_servers import web_server

pytestmark = pytest.mark.io

REGION = {"type": "string", "x-mcp-header": "Region"}
DONE: dict[str, Any] = {"resultType": "complete", "content": [{"type": "text", "text": "done"}]}


@dataclass
class Modern:
    """A server that offers the tool ``run``, and answers its calls with ``result``."""

    result: dict[str, Any] = field(default_factory=lambda: DONE)
    parameters: dict[str, Any] = field(default_factory=lambda: {"region": REGION})
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """The method of each request, and its ``Mcp-Param-Region``."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        self.requests.append((message["method"], request.headers.get("Mcp-Param-Region")))
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": self._result(message["method"])})

    def _result(self, method: str) -> dict[str, Any]:
        match method:
            case "server/discover":
                about = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}}
                return {**about, "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
            case "tools/list":
                schema = {"type": "object", "properties": self.parameters}
                tools = [{"name": "run", "inputSchema": schema}]
                return {"tools": tools, "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
            case _:
                return self.result


@asynccontextmanager
async def serving(modern: Modern) -> AsyncIterator[str]:
    async with web_server(modern.handle) as url:
        yield f"{url}/mcp"


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("owner", ["operator", "request"])
async def test_first_call_has_the_headers_of_its_arguments(make: MakeServers, owner: str, is_listed: bool) -> None:
    """The listing and the call of a server in a request use two connections."""
    modern = Modern()
    async with serving(modern) as url:
        servers = make({"modern": HttpServer(url)})
        server = McpServer("modern", None if owner == "operator" else url)
        if is_listed:  # a conversation may know the tools already
            await servers.tools(server, PATIENT)
        session = servers.session(server)
        for _ in range(2):
            assert await session.run("run", '{"region": "eu"}', PATIENT) == ToolResult("done")
        await session.close()
    assert modern.requests[-2:] == [("tools/call", "eu")] * 2
    assert [method for method, _ in modern.requests].count("tools/list") <= 2


async def test_tool_without_headers_is_called_without_another_listing(make: MakeServers) -> None:
    modern = Modern(parameters={"region": {"type": "string"}})
    async with serving(modern) as url:
        servers = make()
        await servers.tools(McpServer("x", url), PATIENT)
        session = servers.session(McpServer("x", url))
        assert await session.run("run", '{"region": "eu"}', PATIENT) == ToolResult("done")
        await session.close()
    assert [method for method, _ in modern.requests].count("tools/list") == 1
    assert modern.requests[-1] == ("tools/call", None)


async def test_model_reads_which_input_a_tool_asks_for(make: MakeServers) -> None:
    question = {"mode": "form", "message": "Which branch?", "requestedSchema": {"type": "object", "properties": {}}}
    asked = {"branch": {"method": "elicitation/create", "params": question}, "roots": {"method": "roots/list"}}
    modern = Modern({"resultType": "input_required", "inputRequests": asked})
    async with serving(modern) as url:
        session = make().session(McpServer("x", url))
        outcome = await session.run("run", "{}", PATIENT)
        await session.close()
    text = "The tool asks for more input, which cannot be given to a running call.\nWhich branch?\nroots/list"
    error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}
    assert outcome == ToolResult(error=text, data=McpError(error))


async def test_result_without_a_type_is_complete(make: MakeServers) -> None:
    modern = Modern({"content": DONE["content"]})
    async with serving(modern) as url:
        session = make().session(McpServer("x", url))
        assert await session.run("run", "{}", PATIENT) == ToolResult("done")
        await session.close()
