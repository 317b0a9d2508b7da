"""Servers in process with tools that run, markup of calls, and the sites that tools reach."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.extensions.programs.host import ProgramHost
from penstock.extensions.tools.browser.search_engines import search_backend
from penstock.extensions.tools.browser.session import BrowserHost
from penstock.extensions.tools.mcp.mcp_servers import McpServers
from penstock.extensions.tools.sandbox.container import ContainerHost
from penstock.extensions.tools.sandbox.live_containers import OpenContainers
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.extensions.tools.sandbox.python import PythonHost
from penstock.pipeline.frames import ResolvedRequest, Sampling
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.items import Item
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.mcp_config import ServerConfig
from penstock.services.slots import Slots
from penstock.services.tools import Host, Toolbox
from penstock.services.web.ssrf import AllowedNetworks
from penstock.stages.converse.tool_loop import Limits
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.api_clients import StreamReader
from tests.support.event_streams import read_sse
from tests.support.mcp_servers import LOCAL
from tests.support.server import ScriptedServer, running_server, script
from tests.support.stored_responses import facts, response

Json: TypeAlias = dict[str, Any]

MODES: Mapping[str, Json] = {
    "whole": {},
    "stream": {"stream": True},
    "background": {"background": True},
    "background stream": {"background": True, "stream": True},
}
"""Fields of a request by mode."""

STORED_MODES: list[tuple[str, bool]] = [
    *((mode, True) for mode in MODES),
    *((mode, False) for mode in MODES if "background" not in mode),
]
"""Modes, each with the value of ``store``."""

# What the model writes


def python_markup(code: str) -> str:
    return f"<|channel|>analysis to=python code<|message|>{code}<|call|>"


def call_markup(recipient: str, arguments: Json | str) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f"<|channel|>commentary to={recipient} <|constrain|>json<|message|>{text}<|call|>"


def browser_markup(name: str, arguments: Json | str) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f"<|channel|>analysis to=browser.{name} code<|message|>{text}<|call|>"


def answer_markup(text: str = "Done.") -> str:
    return f"<|channel|>final<|message|>{text}<|return|>"


def join_calls(*calls: str) -> str:
    return "<|start|>assistant".join(calls)


def mcp_tool(label: str = "docs", url: str | None = None, **fields: Any) -> Json:
    """An MCP server in a request; its calls need no approval."""
    return {"type": "mcp", "server_label": label, "server_url": url, "require_approval": "never", **fields}


CODE_TOOL: Json = {"type": "code_interpreter", "container": {"type": "auto"}}


def in_container(container_id: str) -> list[Json]:
    """Return the code interpreter in a container, as the tools of a request."""
    return [{"type": "code_interpreter", "container": container_id}]


SEARCH_TOOL: Json = {"type": "web_search"}

# Serving


@asynccontextmanager
async def tool_server(
    where: Any,
    turns: Sequence[str] = (),
    *,
    servers: Mapping[str, ServerConfig] | None = None,
    allowed: AllowedNetworks = LOCAL,
    sandbox: Sandbox | None = None,
    shell: Sandbox | None = None,
    programs: ProgramHost | None = None,
    search: str = "",
    toolbox: Toolbox | None = None,
    limits: Limits | None = None,
    models: tuple[str, ...] = ("tiny",),
    engine: ScriptedEngine | None = None,
    **options: Any,
) -> AsyncGenerator[ScriptedServer, None]:
    """Serve with tools and a model that writes ``turns``, repeating the last one.

    ``servers`` are the operator's MCP servers and ``search`` is the URL of a search engine.  Code runs in containers of
    ``sandbox``, and commands in those of ``shell``; ``programs`` runs programs.  A ``toolbox`` replaces all of these
    tools.
    """
    limits = limits or Limits()
    containers = OpenContainers(Slots(8), call_seconds=limits.call_seconds)
    hosts: dict[str, Host] = {}
    if sandbox:
        containers.sandboxes["python"] = sandbox
        hosts["python"] = PythonHost(containers)
    if shell:
        containers.sandboxes["container"] = shell
        hosts["container"] = ContainerHost(containers)
    if programs:
        hosts["program"] = programs
    if search:
        hosts["browser"] = BrowserHost(search_backend("searxng", search), allowed)
    toolbox = toolbox or Toolbox(hosts, McpServers(servers or {}, allowed), containers=containers)
    engine = engine or ScriptedEngine(models=models)
    play_turns(engine, *turns)
    try:
        async with running_server(engine, where, toolbox=toolbox, limits=limits, **options) as served:
            containers.store = served.store
            yield served
    finally:
        await toolbox.close()


def play_turns(engine: ScriptedEngine, *turns: str) -> None:
    scripts = [script(text) for text in (*turns, answer_markup())[: len(turns) or 1]]
    engine.turns, engine.script = scripts, scripts[-1]


@dataclass
class ClientResponse:
    response: Json
    raw: bytes
    events: list[ResponseEvent]

    @property
    def output(self) -> list[Json]:
        return list(self.response["output"])

    @property
    def types(self) -> list[str]:
        return [item["type"] for item in self.output]

    @property
    def bodies(self) -> list[Json]:
        lines = self.raw.decode().split("\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]

    def ladder(self, index: int) -> list[str]:
        """Return the event types of an item in order, without repetitions."""
        names = [body["type"] for body in self.bodies if body.get("output_index") == index]
        short = [name.removeprefix("response.") for name in names]
        return [name for at, name in enumerate(short) if not at or short[at - 1] != name]


async def respond(served: ScriptedServer, mode: str, body: Json) -> ClientResponse:
    """Create a response in this mode; check that the stored response and its log equal it."""
    wanted = {"input": "Hi", **body, **MODES[mode]}
    if "stream" in wanted:
        raw = await served.stream(wanted)
        response = ClientResponse({}, raw, []).bodies[-1]["response"]
    else:
        raw, response = b"", await _respond_whole(served, wanted)
    if response["store"]:
        path = f"/v1/responses/{response['id']}"
        again = await served.again(f"{path}?stream=true")
        assert raw in (b"", again)
        assert await served.get_response(response["id"]) == response
        raw = again
    received = ClientResponse(response, raw, read_sse(raw) if raw else [])
    assert not raw or received.bodies[-1]["response"] == response
    return received


async def _respond_whole(served: ScriptedServer, wanted: Json) -> Json:
    status, response = await served.post(wanted)
    assert status == 200, response
    if response["background"]:
        assert response["output"] == []
        return await served.wait_for_end(response["id"])
    return dict(response)


def prompts_read(served: ScriptedServer) -> list[str]:
    """Return the prompts so far as text, turn by turn."""
    return [load_encoding().decode(prompt.token_ids) for prompt in served.engine.prompts]


async def expect_silence(stream: StreamReader) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.15):
            await stream.answer.content.readany()


def running_tasks() -> Counter[str]:
    """Count the tasks of this process by name, except those of the HTTP server and of tests."""
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return Counter(name for name in names if not name.startswith(("RequestHandler.", "Server.", "test_")))


@asynccontextmanager
async def answering(*parts: bytes) -> AsyncIterator[int]:
    """Run a server that answers every request with these bytes, and yield its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def web_server(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Serve with ``handler`` for the length of the block; yield the URL."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    server = TestServer(app)
    await server.start_server(shutdown_timeout=0.1)
    try:
        yield f"http://{server.host}:{server.port}"
    finally:
        await server.close()


# A web site


@dataclass
class Site:
    """A site with a search engine and one page; the page waits for ``gate``."""

    url: str = ""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    queries: list[str] = field(default_factory=list)
    requests: int = 0
    """Requests so far."""

    async def handle(self, request: web.Request) -> web.Response:
        self.requests += 1
        if request.path == "/search":
            self.queries.append(request.query["q"])
            hit = {"title": "Gates", "url": f"{self.url}/gates", "content": "All about gates."}
            return web.json_response({"results": [hit]})
        if request.path != "/gates":
            raise web.HTTPNotFound
        await self.gate.wait()
        text = "<html><title>Gates</title><body><p>A gate opens.</p><p>A gate closes.</p></body></html>"
        return web.Response(text=text, content_type="text/html")


@asynccontextmanager
async def running_site() -> AsyncIterator[Site]:
    site = Site()
    site.gate.set()
    async with web_server(site.handle) as site.url:
        yield site


LOOPBACK = AllowedNetworks.parse(["127.0.0.0/8"])
SAMPLING = Sampling(temperature=1.0, top_p=1.0)


def conversation_with(
    history: tuple[Item, ...] = (), given: tuple[Item, ...] = (), results: Mapping[str, str] | None = None
) -> ResolvedRequest:
    begun = response(status="in_progress", completed_at=None, output=())
    return ResolvedRequest(facts(begun, input=given, sampling=SAMPLING), history, results=results or {})


RED, BLUE = (255, 0, 0), (0, 0, 255)


def png(colour: tuple[int, int, int] = RED, width: int = 8, height: int = 8) -> bytes:
    rows = (b"\0" + bytes(colour) * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def data_url(image: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"


IMAGES = {
    "image/png": png(),
    "image/jpeg": b"\xff\xd8\xff\xe0\0\x10JFIF",
    "image/webp": b"RIFF\x24\0\0\0WEBPVP8 ",
    "image/gif": b"GIF89a\1\0\1\0",
}
"""The beginnings of images, by their types; the first is whole."""


class Gallery:
    """A handler of images that keeps the paths of its requests; ``/to`` redirects."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.waiting = asyncio.Event()

    async def show(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request.path)
        match request.path:
            case "/to":
                raise web.HTTPFound(request.query["url"])
            case "/page":
                return web.Response(text="<html>secret</html>", content_type="image/png")
            case "/slow":
                self.waiting.set()
                await asyncio.Event().wait()
                raise AssertionError
            case path if path.startswith("/gone"):
                return web.Response(status=404, body=png())
            case "/blue":
                return web.Response(body=png(BLUE), content_type="application/octet-stream")
            case path if path[1:] in ("jpeg", "webp", "gif"):
                return web.Response(body=IMAGES[f"image{path}"], content_type=f"image{path}")
            case _:
                return web.Response(body=png(), content_type="image/png")


class UnusedSession:
    """A use of a tool that nothing calls."""

    async def run(self, name: str, text: str, seconds: float) -> NoReturn:
        raise AssertionError

    async def close(self) -> None:
        return


class UnusedHost:
    """A tool that a server has, and that no model calls."""

    def session(self, request: ResolvedRequest) -> UnusedSession:
        return UnusedSession()

    async def close(self) -> None:
        return


@asynccontextmanager
async def serving_everything(
    folder: Path, kinds: Sequence[str] = ("browser", "container", "program", "python")
) -> AsyncGenerator[ScriptedServer, None]:
    """Serve with all tools, and as with a model that sees images."""
    toolbox = Toolbox({kind: UnusedHost() for kind in kinds}, McpServers({}))
    async with running_server(ScriptedEngine(), folder, toolbox=toolbox, sees_images=True) as served:
        yield served
