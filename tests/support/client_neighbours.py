"""What the server under test reaches for its tools: an MCP server, a search engine, and the page that it finds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route

PORT = 40857
"""The tiny model reads it, and what it does next hangs on every token: with this one it was seen to go on."""

PAGE = "<title>vLLM</title><p>A library for inference and serving."


def search(query: str) -> str:
    """Search the documentation."""
    return f"{query}: a pipe that leads water to a turbine"


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def found(request: Request) -> JSONResponse:
    """What SearXNG would answer."""
    return JSONResponse({"results": [{"url": f"{request.base_url}vllm", "title": "vLLM"}]})


async def page(_: Request) -> HTMLResponse:
    """What there is to read."""
    return HTMLResponse(PAGE)


def application() -> Starlette:
    """All of them: the MCP server is at /mcp."""
    server = MCPServer("neighbour", log_level="CRITICAL")
    for tool in (search, add):
        server.add_tool(tool)
    app = server.streamable_http_app()
    app.router.routes += [Route("/search", found), Route("/vllm", page)]
    return app


@contextmanager
def neighbours() -> Iterator[str]:
    """Their base URL, for the length of the block."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", PORT))
        except OSError:  # somebody else has it
            listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(application(), log_level="critical", ws="none"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
