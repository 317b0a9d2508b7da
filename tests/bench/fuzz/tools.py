"""Have a server process call hostile MCP servers, beside an ordinary client whose MCP server is a good one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web
from pydantic_settings import CliApp

from penstock.api.cli.serve import serve
from penstock.api.settings import Settings
from penstock.api.start.assembly import RunningEngine
from penstock.pipeline.logs import log_to_stderr
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.responses import harmony_stages
from tests.bench.fuzz.fire import HANGS, Outcome, complaints
from tests.bench.fuzz.floods import ordinary_client
from tests.support.mcp_messages import TOOL, Handle, Json, result, speaking
from tests.support.server_process import ServerProcess, serving_process
from tests.support.tool_servers import answer_markup, call_markup, mcp_tool, web_server

TOOL_SECONDS = 240
"""Seconds that a call, or a listing, may take: what has no end is ended for its size."""

MEGABYTES = 2**20

LONGEST = 4_000
"""Characters of an answer that are shown when it is not as it must be."""

TEXT: Json = {"type": "text", "text": "x"}


def returning(*content: Json) -> Handle:
    """A server whose tool returns these parts."""
    return speaking(call=partial(_returned, content))


async def _returned(content: Sequence[Json], _: web.Request, message: Json) -> web.StreamResponse:
    return web.json_response(result(message, {"content": content}))


def streaming(kind: str, pieces: Callable[[], Any]) -> Handle:
    """A server whose tool answers with pieces of a body, without end."""

    async def call(request: web.Request, _: Json) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": kind})
        await answer.prepare(request)
        with suppress(ConnectionError):
            for piece in pieces():
                await answer.write(piece)
        return answer

    return speaking(call=call)


def messages(method: str, **fields: Any) -> Callable[[], Any]:
    """Return what makes events with messages of the server, without end."""

    def made() -> Any:
        for number in count():
            message = {"jsonrpc": "2.0", "method": method, "params": {"progressToken": 1, "progress": number}}
            yield b"data: %b\n\n" % json.dumps(message | ({"id": number} if fields.get("asks") else {})).encode()

    return made


def without_end(piece: bytes) -> Callable[[], Any]:
    return lambda: (piece for _ in count())


def deep(levels: int) -> Json:
    schema: Json = {}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


ANSWERED, REFUSED = "an ordinary result", "an error that the model reads"
STREAM = "text/event-stream"

ATTACKS: Mapping[str, tuple[Handle, str]] = {
    "a result of 300,000 parts": (returning(*[TEXT] * 300_000), REFUSED),
    "a result of 2,000 parts": (returning(*[TEXT] * 2_000), REFUSED),
    "a text of 20 MB": (returning({**TEXT, "text": "x" * 20 * MEGABYTES}), REFUSED),
    "a text of 12 MB": (returning({**TEXT, "text": "x" * 12 * MEGABYTES}), ANSWERED),
    "a text of 6 MB of escapes": (returning({**TEXT, "text": "\n" * 3 * MEGABYTES}), ANSWERED),
    "a listing of 100,000 tools": (speaking([{**TOOL, "name": f"do{number}"} for number in range(100_000)]), REFUSED),
    "a listing of 2,000 tools": (
        speaking(
            [TOOL, *({**TOOL, "name": f"do{number}"} for number in range(1_999))], call=partial(_returned, [TEXT])
        ),
        ANSWERED,
    ),
    "a schema of 300 levels": (speaking([{**TOOL, "inputSchema": deep(300)}]), REFUSED),
    "a flood of requests": (streaming(STREAM, messages("sampling/createMessage", asks=True)), REFUSED),
    "a flood of notifications": (streaming(STREAM, messages("notifications/tools/list_changed")), REFUSED),
    "a flood of progress": (streaming(STREAM, messages("notifications/progress")), REFUSED),
    "a body without end": (streaming("application/json", without_end(b" " * 2**16)), REFUSED),
    "an event without end": (streaming(STREAM, without_end(b"data: " + b" " * 2**16)), REFUSED),
}
"""Servers by name, each with what their tool, or their list of tools, must come to."""


def asking(url: str) -> Json:
    return {"input": "Hi", "store": False, "tools": [mcp_tool(url=url)]}


async def attack_tools(server: ServerProcess) -> dict[str, Outcome]:
    """Name each hostile server in a request; return what became of it."""
    found = dict[str, Outcome]()
    async with web_server(returning(TEXT)) as good, ordinary_client(server, asking(f"{good}/mcp")) as ordinary:
        for number, (name, (handle, wanted)) in enumerate(ATTACKS.items()):
            found[name] = outcome = Outcome()
            async with web_server(handle) as url:  # a path of its own, as tools are remembered and ports come again
                end = await _end_of(server, asking(f"{url}/{number}/mcp"))
            outcome.statuses[end] += 1
            if end != wanted:
                outcome.fault(f"it came to {end}, not {wanted}", name)
    return {**found, "an ordinary client of tools": ordinary, "after the tools": Outcome(faults=complaints(server))}


async def _end_of(server: ServerProcess, body: Json) -> str:
    try:
        async with asyncio.timeout(HANGS):
            status, answer = await server.post(body)
    except TimeoutError:
        return "a hang"
    if status != 200:
        return f"{status}: {answer['error']['message']}"
    items = {item["type"]: item for item in answer["output"]}
    if any(item.get("error") for item in items.values()):
        return REFUSED
    return ANSWERED if "mcp_call" in items else f"neither a call nor an error: {json.dumps(answer)[:LONGEST]}"


def serve_caller(*arguments: str) -> None:
    """Serve a scripted model that calls the tool of an MCP server once in each response."""

    async def serving() -> None:
        settings = CliApp.run(Settings, cli_args=list(arguments))
        log_to_stderr(settings.log_level)
        call, answer = (
            Script(load_encoding().encode_markup(text)) for text in (call_markup("docs.do", {}), answer_markup())
        )
        engine = ScriptedEngine(answer, models=(settings.model or "",), turns=(call,))
        await serve(settings, lambda _: nullcontext(RunningEngine(engine, harmony_stages(load_encoding()))))

    uvloop.run(serving())


@asynccontextmanager
async def calling_process(folder: Path) -> AsyncGenerator[ServerProcess, None]:
    """Run a server whose model calls tools, and that may reach the MCP servers of this machine."""
    options = ("caller", "--no-sandbox", "--allow-address", "127.0.0.1", "--tool-timeout", str(TOOL_SECONDS))
    async with serving_process(serve_caller, options, str(folder / "tools.sqlite3"), folder) as server:
        yield server
