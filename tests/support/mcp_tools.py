"""The MCP servers that `tests.support.mcp_servers` starts, as the program of their process.

python -m tests.support.mcp_tools KIND            over stdin and stdout
python -m tests.support.mcp_tools --port PORT     all kinds at once, over HTTP: /KIND/mcp and /KIND/sse
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import mcp_types
import uvicorn
from mcp.server import Server
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.stdio import stdio_server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

READ_ONLY = mcp_types.ToolAnnotations(read_only_hint=True)
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

happened: Counter[str] = Counter()
"""Counts of events, such as the calls of ``hang`` that began or were cancelled."""


# Tools that behave in every way there is


def echo(text: str) -> mcp_types.CallToolResult:
    """Say it again."""
    return _text(text)


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def slow(seconds: float) -> mcp_types.CallToolResult:
    """Take so long."""
    await asyncio.sleep(seconds)
    return _text("done")


async def wait(path: str) -> mcp_types.CallToolResult:
    """Return once there is a file of that name."""
    while not await asyncio.to_thread(Path(path).exists):
        await asyncio.sleep(0.01)
    return _text("open")


async def hang() -> str:
    """Never return."""
    with _counted("hang"):
        await asyncio.Event().wait()
    return ""


def boom() -> str:
    """Fail."""
    raise ToolError("It went boom.")


def die() -> str:
    """End the whole process."""
    os._exit(1)


def fragile_read(marker: str) -> mcp_types.CallToolResult:
    """End the process unless there is a file of that name; make it before."""
    return _fragile(marker)


def fragile_write(marker: str) -> mcp_types.CallToolResult:
    """End the process unless there is a file of that name; make it before."""
    return _fragile(marker)


def header(name: str, ctx: Context) -> mcp_types.CallToolResult:
    """Return a header of the request, backwards."""
    return _text((ctx.headers or {}).get(name, "")[::-1])


def leak(ctx: Context) -> mcp_types.CallToolResult:
    """Give away all headers."""
    return _text(json.dumps(dict(ctx.headers or {})))


def parent(ctx: Context) -> mcp_types.CallToolResult:
    """Return the trace context of the call."""
    return _text(str((ctx.request_context.meta or {}).get("traceparent")))


def environment(name: str) -> mcp_types.CallToolResult:
    """A variable of the environment."""
    return _text(os.environ.get(name, ""))


def state() -> mcp_types.CallToolResult:
    """Return the counts."""
    return _text(json.dumps({**happened, "pid": os.getpid()}))


def record() -> mcp_types.CallToolResult:
    """Only structure, no text."""
    return mcp_types.CallToolResult(content=[], structured_content={"n": 1, "who": "Zoë"})


def media() -> mcp_types.CallToolResult:
    """A text, a picture, a sound, a resource and a link."""
    text = mcp_types.TextResourceContents(uri="memo://one", text="Remember the milk.")
    return mcp_types.CallToolResult(
        content=[
            mcp_types.TextContent(text="See:"),
            mcp_types.ImageContent(data=PIXEL, mime_type="image/png"),
            mcp_types.AudioContent(data="AAAA", mime_type="audio/wav"),
            mcp_types.EmbeddedResource(resource=text),
            mcp_types.ResourceLink(name="notes", uri="memo://two"),
        ]
    )


def big(size: int) -> mcp_types.CallToolResult:
    """So many letters."""
    return _text("x" * size)


async def grow(ctx: Context) -> mcp_types.CallToolResult:
    """Add a tool, and say so."""
    ctx.mcp_server.add_tool(lambda: "new", name="grown", description="A tool that was not there before.")
    await ctx.session.send_tool_list_changed()
    return _text("grown")


TOOLS: tuple[Callable[..., Any], ...] = (
    *(echo, fragile_read, add, slow, wait, hang, boom, die, fragile_write),
    *(header, leak, parent, environment, state, record, media, big, grow),
)
READING: frozenset[Callable[..., Any]] = frozenset((echo, fragile_read))
"""Tools with the read-only annotation."""


def good() -> MCPServer:
    """A server with tools that behave in every way."""
    server = MCPServer("good", log_level="CRITICAL")
    for tool in TOOLS:
        server.add_tool(tool, annotations=READ_ONLY if tool in READING else None)
    return server


def many() -> Server[Any]:
    """A thousand tools, a hundred to a page."""
    return _paged("many", MANY)


def endless() -> Server[Any]:
    """Pages of tools without a last page."""
    return _paged("endless", sys.maxsize)


def _paged(name: str, total: int) -> Server[Any]:

    async def list_tools(ctx: Any, params: mcp_types.PaginatedRequestParams | None) -> mcp_types.ListToolsResult:
        start = int(params.cursor) if params and params.cursor else 0
        end = start + 100
        tools = [
            mcp_types.Tool(name=f"tool_{n}", description=f"Number {n}.", input_schema={"type": "object"})
            for n in range(start, min(end, total))
        ]
        return mcp_types.ListToolsResult(tools=tools, next_cursor=str(end) if end < total else None)

    async def call_tool(ctx: Any, params: mcp_types.CallToolRequestParams) -> mcp_types.CallToolResult:
        return _text(f"This was {params.name}.")

    return Server(name, on_list_tools=list_tools, on_call_tool=call_tool)


def python() -> MCPServer:
    """A substitute for the built-in python; it keeps variables, separately for each ``x-session-id``."""
    server = MCPServer("python", instructions="Python with numpy.", log_level="CRITICAL")
    names: dict[str, dict[str, Any]] = {}

    @server.tool(name="python", meta={"include_in_prompt": False})
    def run(code: str, ctx: Context) -> mcp_types.CallToolResult:
        """Run it."""
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(code, names.setdefault((ctx.headers or {}).get("x-session-id", ""), {}))
        return _text(output.getvalue())

    server.add_tool(header)
    return server


def browser() -> MCPServer:
    """A substitute for the built-in browser."""
    server = MCPServer("browser", log_level="CRITICAL")

    @server.tool()
    def search(query: str, topn: int = 10) -> mcp_types.CallToolResult:
        """Search."""
        return _text(f"[0] {topn} results for {query}")

    @server.tool(name="open")
    def open_page(id: int | str = -1, cursor: int = -1) -> mcp_types.CallToolResult:  # noqa: A002
        """Open."""
        return _text(f"[1] page {id}")

    @server.tool()
    def find(pattern: str, cursor: int = -1) -> mcp_types.CallToolResult:
        """Find."""
        return _text(f"[2] {pattern} is here")

    return server


def container() -> MCPServer:
    """A substitute for the built-in container, with one more function and one that the prompt leaves out."""
    server = MCPServer("container", instructions="A container with a terminal.", log_level="CRITICAL")

    @server.tool(name="exec")
    def run(cmd: list[str], timeout: int | None = None) -> mcp_types.CallToolResult:
        """Pretend to run it."""
        return _text(f"ran {' '.join(cmd)}")

    @server.tool()
    def feed_chars(chars: str) -> mcp_types.CallToolResult:
        """Type into the terminal."""
        return _text(f"typed {chars}")

    @server.tool(meta={"include_in_prompt": False})
    def cleanup_session() -> mcp_types.CallToolResult:
        """End the session."""
        return _text("ended")

    return server


def counting() -> MCPServer:
    """A server that counts the calls of its tools."""
    server = MCPServer("counting", log_level="CRITICAL")

    @server.tool()
    def count(name: str) -> mcp_types.CallToolResult:
        """Return how often a name was counted."""
        happened[name] += 1
        return _text(str(happened[name]))

    server.add_tool(hang)
    return server


KINDS: dict[str, Callable[[], MCPServer | Server[Any]]] = {
    kind.__name__: kind for kind in (good, many, endless, python, browser, container, counting)
}


def _text(text: str) -> mcp_types.CallToolResult:
    return mcp_types.CallToolResult(content=[mcp_types.TextContent(text=text)])


def _fragile(marker: str) -> mcp_types.CallToolResult:
    if not Path(marker).exists():
        Path(marker).touch()
        os._exit(1)
    return _text("alive")


@contextmanager
def _counted(name: str) -> Iterator[None]:
    happened[name] += 1
    try:
        yield
    except asyncio.CancelledError:
        happened[f"{name} cancelled"] += 1
        raise


# The process


class Recorded:
    """Middleware that counts requests and keeps the latest headers by path; ``/state`` returns both."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.latest: dict[str, dict[str, str]] = {}
        self.requests: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/state":
            path = scope["path"]
            self.latest[path] = {name.decode(): value.decode() for name, value in scope["headers"]}
            self.requests[f"{scope['method']} {path}"] += 1
        elif scope["type"] == "http":
            state = {**happened, "headers": self.latest, "requests": self.requests}
            await JSONResponse(state)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def guarded(app: ASGIApp) -> ASGIApp:
    """Answer 401 to requests without the right header."""

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        if dict(scope["headers"]).get(b"authorization", b"").decode() == TOKEN:
            await app(scope, receive, send)
        else:
            denied = PlainTextResponse("No.", 401, {"WWW-Authenticate": "Bearer"})
            await denied(scope, receive, send)

    return check


def legacy(app: ASGIApp) -> ASGIApp:
    """Answer 400 to the newer handshake, so that clients fall back to the older one."""

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        messages = [await receive()] if scope["method"] == "POST" else []
        if messages and b"server/discover" in messages[0].get("body", b""):
            await Response(status_code=400)(scope, receive, send)
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await app(scope, replay, send)

    return check


async def away(request: Request) -> Response:
    """Redirect to the URL in the query."""
    return RedirectResponse(request.query_params["to"], 307)


async def broken(request: Request) -> Response:
    """Answer with an error that repeats the request's URL and ``Authorization``."""
    return PlainTextResponse(f"Oh no: {request.headers.get('authorization')} at {request.url}", 500)


async def mute(request: Request) -> Response:
    """Never answer."""
    await asyncio.Event().wait()
    return Response()


def application() -> ASGIApp:
    """All kinds in one application."""
    servers = {kind: make() for kind, make in KINDS.items()}
    apps = {kind: server.streamable_http_app() for kind, server in servers.items()}
    mounts = [Mount(f"/{kind}", app) for kind, app in apps.items()]
    plain, older = good(), good()
    for kind, server in servers.items():
        if isinstance(server, MCPServer):
            apps[kind].router.routes.extend(server.sse_app().routes)
    events = plain.sse_app(sse_path="/mcp")
    older_app = older.streamable_http_app()
    guarded_app = plain.streamable_http_app()
    mounts += [Mount("/guarded", guarded(guarded_app)), Mount("/legacy", legacy(older_app)), Mount("/events", events)]
    routes = [Route(f"/{route.__name__}/{{over}}", route, methods=["GET", "POST"]) for route in (away, broken, mute)]

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for server in (*servers.values(), plain, older):
                await stack.enter_async_context(server.session_manager.run())
            yield

    return Recorded(Starlette(routes=[*mounts, *routes], lifespan=running))


def main() -> None:
    """Serve."""
    match sys.argv[1:]:
        case ["--port", port]:
            uvicorn.run(application(), port=int(port), log_level="critical", ws="none")
        case arguments:
            server = KINDS[arguments[0]]()
            asyncio.run(server.run_stdio_async() if isinstance(server, MCPServer) else _stdio(server))


async def _stdio(server: Server[Any]) -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


TOKEN = "Bearer sesame-open-1234"
"""The ``Authorization`` header that the kind ``guarded`` requires."""

MANY = 1000


if __name__ == "__main__":
    main()
