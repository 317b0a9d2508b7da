"""Servers with tools that run: MCP servers, sandboxes and a web of their own, and a model that calls them."""

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
from typing import Any, TypeAlias

import pytest
from aiohttp import web

from pipeline.frames import Conversation, Sampling
from pipeline.protocol.events import ResponseEvent
from pipeline.protocol.items import Item
from stages.converse.browser.backends import backend_of
from stages.converse.browser.host import BrowserHost
from stages.converse.exchange import Limits
from stages.converse.mcp.config import ServerConfig
from stages.converse.mcp.servers import McpServers
from stages.converse.sandbox.probe import Sandbox
from stages.converse.sandbox.python import PythonHost
from stages.converse.tools import Host, Toolbox
from stages.generate.scripted import ScriptedEngine
from stages.guard import AllowedNetworks
from stages.harmony import HarmonyEncoding
from tests.support.api_clients import StreamReader, get_response, wait_for_end
from tests.support.event_streams import read_sse
from tests.support.mcp_servers import LOCAL
from tests.support.server import ScriptedServer, running_server, script
from tests.support.stored_responses import response

Json: TypeAlias = dict[str, Any]

MODES: Mapping[str, Json] = {
    "whole": {},
    "stream": {"stream": True},
    "background": {"background": True},
    "background stream": {"background": True, "stream": True},
}
"""The ways to ask for a response, by what a request says of them."""

STORED_MODES: list[tuple[str, bool]] = [
    *((mode, True) for mode in MODES),
    *((mode, False) for mode in MODES if "background" not in mode),
]
"""Modes, and whether the response is stored."""

# What the model writes


def python_markup(code: str) -> str:
    """A call of the code interpreter."""
    return f"<|channel|>analysis to=python code<|message|>{code}<|call|>"


def call_markup(recipient: str, arguments: Json | str) -> str:
    """A call of a function, or of a tool of an MCP server."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f"<|channel|>commentary to={recipient} <|constrain|>json<|message|>{text}<|call|>"


def browser_markup(name: str, arguments: Json | str) -> str:
    """A call of the browser."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f"<|channel|>analysis to=browser.{name} code<|message|>{text}<|call|>"


def answer_markup(text: str = "Done.") -> str:
    """The last words."""
    return f"<|channel|>final<|message|>{text}<|return|>"


def join_calls(*calls: str) -> str:
    """Several calls in one turn."""
    return "<|start|>assistant".join(calls)


def mcp_tool(label: str = "docs", url: str | None = None, **fields: Any) -> Json:
    """An MCP server in a request, whose calls need nobody's approval."""
    return {"type": "mcp", "server_label": label, "server_url": url, "require_approval": "never", **fields}


CODE_TOOL: Json = {"type": "code_interpreter", "container": {"type": "auto"}}
SEARCH_TOOL: Json = {"type": "web_search"}

# Serving


@asynccontextmanager
async def tool_server(
    encoding: HarmonyEncoding,
    where: Any,
    turns: Sequence[str] = (),
    *,
    servers: Mapping[str, ServerConfig] | None = None,
    allowed: AllowedNetworks = LOCAL,
    sandbox: Sandbox | None = None,
    search: str = "",
    toolbox: Toolbox | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> AsyncGenerator[ScriptedServer, None]:
    """A server with tools, whose model plays ``turns``, the last one again and again.

    ``servers`` are the operator's, ``search`` is the URL of its search engine; a ``toolbox`` goes ahead of all of them.
    """
    hosts: dict[str, Host] = {"python": PythonHost(sandbox)} if sandbox else {}
    if search:
        hosts["browser"] = BrowserHost(backend_of("searxng", search), allowed)
    toolbox = toolbox or Toolbox(hosts, McpServers(servers or {}, allowed))
    engine = ScriptedEngine()
    play_turns(engine, encoding, *turns)
    try:
        async with running_server(
            engine, encoding, where, toolbox=toolbox, limits=limits or Limits(), **options
        ) as served:
            yield served
    finally:
        await toolbox.close()


def play_turns(engine: ScriptedEngine, encoding: HarmonyEncoding, *turns: str) -> None:
    """Let the model say this in the responses that come."""
    scripts = [script(encoding, text) for text in (*turns, answer_markup())[: len(turns) or 1]]
    engine.turns, engine.script = scripts, scripts[-1]


@dataclass
class ClientResponse:
    """A response as its client got it, all of its events, and the JSON of each."""

    response: Json
    raw: bytes
    events: list[ResponseEvent]

    @property
    def output(self) -> list[Json]:
        return list(self.response["output"])

    @property
    def types(self) -> list[str]:
        """The types of the items."""
        return [item["type"] for item in self.output]

    @property
    def bodies(self) -> list[Json]:
        """The events, as they were sent."""
        lines = self.raw.decode().split("\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]

    def ladder(self, index: int) -> list[str]:
        """What was told of an item: its events in their order, one that comes again and again once."""
        names = [body["type"] for body in self.bodies if body.get("output_index") == index]
        short = [name.removeprefix("response.") for name in names]
        return [name for at, name in enumerate(short) if not at or short[at - 1] != name]


async def respond(served: ScriptedServer, mode: str, body: Json) -> ClientResponse:
    """Ask for a response in this mode; what is stored of it, its log included, is what its client got."""
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
        assert await get_response(served, response["id"]) == response
        raw = again
    told = ClientResponse(response, raw, read_sse(raw) if raw else [])
    assert not raw or told.bodies[-1]["response"] == response
    return told


async def _respond_whole(served: ScriptedServer, wanted: Json) -> Json:
    status, response = await served.post(wanted)
    assert status == 200, response
    if response["background"]:
        assert response["output"] == []
        return await wait_for_end(served, response["id"])
    return dict(response)


def prompts_read(served: ScriptedServer, encoding: HarmonyEncoding) -> list[str]:
    """What the model has read so far, turn by turn."""
    return [encoding.decode(prompt.token_ids) for prompt in served.engine.prompts]


async def expect_silence(stream: StreamReader) -> None:
    """See that nothing more comes for now."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.15):
            await stream.answer.content.readany()


def running_tasks() -> Counter[str]:
    """What this process is at: its tasks, by what they do, but for those that listen to clients."""
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return Counter(name for name in names if not name.startswith(("RequestHandler.", "Server.", "test_")))


# A web


@dataclass
class Site:
    """A site with a search engine; ``gate`` holds its page back."""

    url: str = ""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    queries: list[str] = field(default_factory=list)
    asked: int = 0
    """How many requests came."""

    async def handle(self, request: web.Request) -> web.Response:
        """Find the one page there is, or give it."""
        self.asked += 1
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
    """A web for the length of the block, whose gate is open."""
    site = Site()
    site.gate.set()
    app = web.Application()
    app.router.add_get("/{path:.*}", site.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        site.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield site
    finally:
        await runner.cleanup()


LOOPBACK = AllowedNetworks.parse(["127.0.0.0/8"])
SAMPLING = Sampling(temperature=1.0, top_p=1.0)


@asynccontextmanager
async def web_server(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int = 0
) -> AsyncIterator[str]:
    """The URL of a server whose every request goes to ``handler``, at that port if it is free."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
        except OSError:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def conversation_with(
    history: tuple[Item, ...] = (), given: tuple[Item, ...] = (), results: Mapping[str, str] | None = None
) -> Conversation:
    """One with what was said before."""
    begun = response(status="in_progress", completed_at=None, output=())
    return Conversation(begun, history, given, SAMPLING, "2026-01-01", results=results or {})


RED, BLUE = (255, 0, 0), (0, 0, 255)


def png(colour: tuple[int, int, int] = RED, width: int = 8, height: int = 8) -> bytes:
    """A PNG of one colour."""
    rows = (b"\0" + bytes(colour) * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def data_url(image: bytes, kind: str = "image/png") -> str:
    """An image as clients write it."""
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"


IMAGES = {
    "image/png": png(),
    "image/jpeg": b"\xff\xd8\xff\xe0\0\x10JFIF",
    "image/webp": b"RIFF\x24\0\0\0WEBPVP8 ",
    "image/gif": b"GIF89a\1\0\1\0",
}
"""The beginnings of images, by their types; the first is whole."""


class Gallery:
    """A server of pictures, which counts who looks; ``/to`` leads to another URL."""

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
            case "/gone":
                return web.Response(status=404, body=png())
            case "/blue":
                return web.Response(body=png(BLUE), content_type="application/octet-stream")
            case path if path[1:] in ("jpeg", "webp", "gif"):
                return web.Response(body=IMAGES[f"image{path}"], content_type=f"image{path}")
            case _:
                return web.Response(body=png(), content_type="image/png")
