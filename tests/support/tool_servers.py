"""Servers with tools that run: MCP servers, sandboxes and a web of their own, and a model that calls them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
from aiohttp import web

from pipeline.protocol.events import ResponseEvent
from stages.converse.browser.backends import backend_of
from stages.converse.browser.host import BrowserHost
from stages.converse.exchange import Limits
from stages.converse.mcp.config import ServerConfig, StdioServer
from stages.converse.mcp.servers import McpServers
from stages.converse.sandbox.probe import Sandbox
from stages.converse.sandbox.python import PythonHost
from stages.converse.tools import Host, Toolbox
from stages.generate.scripted import ScriptedEngine
from stages.guard import AllowedNetworks
from stages.harmony import HarmonyEncoding
from tests.support.event_streams import read_sse
from tests.support.mcp_servers import stdio_config
from tests.support.response_lives import Reading, ended, found
from tests.support.scripts import Scripted, script
from tests.support.server import serving

Json: TypeAlias = dict[str, Any]

LOCAL = AllowedNetworks.parse(["127.0.0.1"])
"""Where all servers of tests are."""

MODES: Mapping[str, Json] = {
    "whole": {},
    "stream": {"stream": True},
    "background": {"background": True},
    "background stream": {"background": True, "stream": True},
}
"""The ways to ask for a response, by what a request says of them."""

ASKED: list[tuple[str, bool]] = [
    *((mode, True) for mode in MODES),
    *((mode, False) for mode in MODES if "background" not in mode),
]
"""Modes, and whether the response is stored."""

# What the model writes


def python(code: str) -> str:
    """A call of the code interpreter."""
    return f"<|channel|>analysis to=python code<|message|>{code}<|call|>"


def call(recipient: str, arguments: Json | str) -> str:
    """A call of a function, or of a tool of an MCP server."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f"<|channel|>commentary to={recipient} <|constrain|>json<|message|>{text}<|call|>"


def browse(name: str, arguments: Json | str) -> str:
    """A call of the browser."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f"<|channel|>analysis to=browser.{name} code<|message|>{text}<|call|>"


def answer(text: str = "Done.") -> str:
    """The last words."""
    return f"<|channel|>final<|message|>{text}<|return|>"


def both(*calls: str) -> str:
    """Several calls in one turn."""
    return "<|start|>assistant".join(calls)


def mcp(label: str = "docs", url: str | None = None, **fields: Any) -> Json:
    """An MCP server in a request, whose calls need nobody's approval."""
    return {"type": "mcp", "server_label": label, "server_url": url, "require_approval": "never", **fields}


CODE: Json = {"type": "code_interpreter", "container": {"type": "auto"}}
SEARCH: Json = {"type": "web_search"}

# Serving


def child(kind: str = "good") -> StdioServer:
    """A server of the operator's, which is started as a child."""
    config = stdio_config(kind)
    return StdioServer(config["command"], tuple(config["args"]), config["env"], config["cwd"])


@asynccontextmanager
async def tooled(
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
) -> AsyncGenerator[Scripted, None]:
    """A server with tools, whose model plays ``turns``, the last one again and again.

    ``servers`` are the operator's, ``search`` is the URL of its search engine; a ``toolbox`` goes ahead of all of them.
    """
    hosts: dict[str, Host] = {"python": PythonHost(sandbox)} if sandbox else {}
    if search:
        hosts["browser"] = BrowserHost(backend_of("searxng", search), allowed)
    toolbox = toolbox or Toolbox(hosts, McpServers(servers or {}, allowed))
    engine = ScriptedEngine()
    plays(engine, encoding, *turns)
    try:
        async with serving(engine, encoding, where, toolbox=toolbox, limits=limits or Limits(), **options) as served:
            yield served
    finally:
        await toolbox.close()


def plays(engine: ScriptedEngine, encoding: HarmonyEncoding, *turns: str) -> None:
    """Let the model say this in the responses that come."""
    scripts = [script(encoding, text) for text in (*turns, answer())[: len(turns) or 1]]
    engine.turns, engine.script = scripts, scripts[-1]


@dataclass
class Told:
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


async def told(served: Scripted, mode: str, body: Json) -> Told:
    """Ask for a response in this mode; what is stored of it, its log included, is what its client got."""
    wanted = {"input": "Hi", **body, **MODES[mode]}
    if "stream" in wanted:
        raw = await served.stream(wanted)
        response = Told({}, raw, []).bodies[-1]["response"]
    else:
        raw, response = b"", await _whole(served, wanted)
    if response["store"]:
        path = f"/v1/responses/{response['id']}"
        again = await served.again(f"{path}?stream=true")
        assert raw in (b"", again)
        assert await found(served, response["id"]) == response
        raw = again
    told = Told(response, raw, read_sse(raw) if raw else [])
    assert not raw or told.bodies[-1]["response"] == response
    return told


async def _whole(served: Scripted, wanted: Json) -> Json:
    status, response = await served.post(wanted)
    assert status == 200, response
    if response["background"]:
        assert response["output"] == []
        return await ended(served, response["id"])
    return dict(response)


def prompts(served: Scripted, encoding: HarmonyEncoding) -> list[str]:
    """What the model has read so far, turn by turn."""
    return [encoding.decode(prompt.token_ids) for prompt in served.engine.prompts]


async def silent(stream: Reading) -> None:
    """See that nothing more comes for now."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.15):
            await stream.answer.content.readany()


def working() -> Counter[str]:
    """What this process is at: its tasks, by what they do, but for those that listen to clients."""
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return Counter(name for name in names if not name.startswith(("RequestHandler.", "Server.", "test_")))


# A web


@dataclass
class Web:
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
async def webbed() -> AsyncIterator[Web]:
    """A web for the length of the block, whose gate is open."""
    site = Web()
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
