"""MCP servers written by hand, message by message, which may answer what no SDK would send."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aiohttp import web

Json: TypeAlias = dict[str, Any]
Handle: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

TOOL: Json = {"name": "do", "inputSchema": {"type": "object"}}


def result(message: Json, answer: Json) -> Json:
    return {"jsonrpc": "2.0", "id": message["id"], "result": answer}


def speaking(
    tools: list[Json] | None = None, call: Callable[[web.Request, Json], Awaitable[Any]] | None = None
) -> Handle:
    """An MCP server that offers ``tools``; ``call`` answers their calls."""

    async def handle(request: web.Request) -> web.StreamResponse:
        message = await request.json() if request.method == "POST" else {}
        match message.get("method"):
            case "initialize":
                info = {"name": "hostile", "version": "1"}
                version = message["params"]["protocolVersion"]
                received = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
                return web.json_response(result(message, received))
            case "tools/list":
                return web.json_response(result(message, {"tools": tools or [TOOL]}))
            case "tools/call" if call is not None:
                answered: web.StreamResponse = await call(request, message)
                return answered
            case str(name) if name.startswith("notifications/"):
                return web.Response(status=202)
            case _:
                pass
        return web.Response(status=405 if request.method == "GET" else 400)

    return handle
