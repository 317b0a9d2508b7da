"""The WebSocket transport beside HTTP: the cost of a token, and the time that the server adds to a tool turn.

The engine answers at once, so that all time is the server's.  The clients run in another process; CPU time is that of
this one, all threads included.  The ways take turns, so that their ratios hold on a busy machine too.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
from aiohttp import web
from yarl import URL

from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.bench.chain import RESENT, SOCKET, STORED, TOOLS
from tests.bench.core import SETTLING
from tests.bench.figures import over
from tests.bench.serving import STREAMS, TOKENS, talking
from tests.support.server import Server, running_server

BARE_SOCKET = "a bare aiohttp server with the events ready, over a socket"

SSE, EACH, LANES = "SSE", "a socket for each stream", f"one socket with {STREAMS} lanes"

BODY = json.dumps({"input": "Hi", "stream": True, "store": False})

TURNS = 20

WAYS = {
    STORED: "POST with previous_response_id",
    RESENT: "POST with all items, store: false",
    SOCKET: "socket with previous_response_id, store: false",
}

CALL = (
    "<|channel|>analysis<|message|>The user wants to know what is in the folder, so I list it.<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.exec_command <|constrain|>json<|message|>"
    '{"argument":"ls -l src"}<|call|>'
)

MOST_BYTES = 2**24

Figures = dict[str, list[float]]
"""Figures by way, one per round."""


def calling() -> ScriptedEngine:
    """Return an engine that thinks, and then calls a tool, 8 tokens at once."""
    return ScriptedEngine(Script(load_encoding().encode_markup(CALL), chunk_size=8))


async def token_costs(rounds: int, tokens: int = TOKENS) -> Figures:
    """Return microseconds of CPU per token, with `STREAMS` streams at once; a first round warms up and is dropped."""
    measured: Figures = {SSE: [], EACH: [], LANES: []}
    with TemporaryDirectory() as folder:
        async with running_server(talking(tokens), Path(folder)) as served:
            clients = {
                SSE: ("readers", str(STREAMS)),
                EACH: ("socket_readers", str(STREAMS), "1"),
                LANES: ("socket_readers", "1", str(STREAMS)),
            }
            for _ in range(1 + rounds):
                for name, (module, *load) in clients.items():
                    cpu, _ = await spent(served, module, *load, BODY)
                    measured[name].append(cpu * 1e6 / (STREAMS * tokens))
    return without_first(measured)


async def turn_times(rounds: int, turns: int = TURNS) -> tuple[Figures, Figures]:
    """Return milliseconds per turn, the median of a chain, and of CPU; a first round warms up and is dropped."""
    ways = [*WAYS, BARE_SOCKET]
    times: Figures = {way: [] for way in ways}
    costs: Figures = {way: [] for way in ways}
    with TemporaryDirectory() as folder:
        async with (
            running_server(calling(), Path(folder), max_body_bytes=MOST_BYTES) as served,
            bare_socket(await events_of_a_turn(served)) as bare,
        ):
            for _ in range(1 + rounds):
                for way in ways:
                    port, over = (bare, SOCKET) if way == BARE_SOCKET else (served, way)
                    cpu, printed = await spent(port, "chain", over, str(turns))
                    times[way].append(statistics.median(json.loads(printed)) * 1e3)
                    costs[way].append(cpu * 1e3 / (1 + turns))
    return without_first(times), without_first(costs)


async def events_of_a_turn(served: Server[ScriptedEngine]) -> list[str]:
    """Return the events that a turn sends over a socket."""
    events = list[str]()
    async with aiohttp.ClientSession() as client, client.ws_connect(f"{served.url}/v1/responses") as socket:
        await socket.send_json({"type": "response.create", "input": "Hi", "tools": TOOLS, "store": False})
        while not events or '"type":"response.completed"' not in events[-1]:
            events.append(await socket.receive_str())
    return events


@asynccontextmanager
async def bare_socket(events: Sequence[str]) -> AsyncGenerator[int, None]:
    """Yield the port of a server that answers each message of a socket with events, for the length of a block."""

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=MOST_BYTES)
        await socket.prepare(request)
        async for message in socket:
            json.loads(message.data)
            for event in events:
                await socket.send_str(event)
        return socket

    app = web.Application()
    app.router.add_get("/v1/responses", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def spent(served: Server[ScriptedEngine] | int, module: str, *arguments: str) -> tuple[float, bytes]:
    """Return seconds of CPU while clients of a server, or of a port, run in another process, and what these print."""
    port = served if isinstance(served, int) else URL(served.url).port
    command = (sys.executable, "-m", f"tests.bench.{module}", str(port), *arguments)
    started = time.process_time()
    clients = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await clients.communicate()
    if clients.returncode:
        raise RuntimeError(f"The clients failed: {module} {arguments}")
    while isinstance(served, Server) and served.store.backlog:
        await asyncio.sleep(0.01)
    await asyncio.sleep(SETTLING)
    return time.process_time() - started, printed


def without_first(measured: Figures) -> Figures:
    return {name: values[1:] for name, values in measured.items()}


def token_table(costs: Figures) -> str:
    lines = [f"{f'{STREAMS} streams, 1 token per step, not stored':48s}us per token   to SSE"]
    for name, values in costs.items():
        lines.append(f"{name:48s}{statistics.median(values):12.2f}{statistics.median(over(costs, name, SSE)):9.2f}")
    return "\n".join(lines)


def turn_table(times: Figures, costs: Figures) -> str:
    lines = [f"{f'a chain of {TURNS} tool turns':60s}ms per turn   to the first   ms of CPU"]
    for way in times:
        figures = f"{statistics.median(times[way]):11.2f}{statistics.median(over(times, way, STORED)):15.2f}"
        lines.append(f"{WAYS.get(way, way):60s}{figures}{statistics.median(costs[way]):12.2f}")
    return "\n".join(lines)
