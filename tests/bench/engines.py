"""Servers over real engines: penstock and vLLM's two frontends, each with its own engine, measured in turns.

All run at the same time, so on one GPU the engine options must give each a share of the memory.  CPU time counts the
process that clients connect to, without its children, which run the engine cores.  The API is Chat Completions, which
all of them have.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import psutil

from tests.bench.beside import BESIDE
from tests.bench.figures import Comparison, Figure
from tests.bench.loopback import OURS, PEER, QUIET, RUST, SERVE, STARTING, cpu_of
from tests.bench.rust_frontend import program
from tests.support.paths import ROOT
from tests.support.processes import free_port

QUESTION = "Never stop talking."
"""The tiny gpt-oss is trained to answer this with an endless text."""

TEXTS = ("content", "reasoning", "reasoning_content")
"""The names that servers give the text in a delta."""

PATIENCE = aiohttp.ClientTimeout(STARTING)


@dataclass
class StreamTimes:
    """One stream as its client sees it: seconds from the request to each delta, and the output tokens of its usage."""

    deltas: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.deltas, self.deltas[1:], strict=False)]

    def record(self, event: bytes, at: float) -> None:
        """Record an event that arrived at second ``at``."""
        if not event.startswith(b"data: {"):
            return
        chunk = json.loads(event.removeprefix(b"data: "))
        if chunk.get("usage"):
            self.tokens = chunk["usage"]["completion_tokens"]
        deltas = [choice["delta"] for choice in chunk["choices"]]
        if any(delta.get(name) for delta in deltas for name in TEXTS):
            self.deltas.append(at)


@dataclass(frozen=True)
class Serving:
    url: str
    model: str
    process: psutil.Process
    client: aiohttp.ClientSession

    async def stream(self, tokens: int) -> StreamTimes:
        times, begun, rest = StreamTimes(), time.perf_counter(), b""
        asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": tokens, "ignore_eos": True}
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **asked}
        async with self.client.post(f"{self.url}/v1/chat/completions", json=body, timeout=PATIENCE) as answer:
            if answer.status != 200:
                raise RuntimeError(f"Refused: {await answer.text()}")
            async for block in answer.content.iter_any():
                at = time.perf_counter() - begun
                *events, rest = (rest + block).split(b"\n\n")
                for event in events:
                    times.record(event, at)
        if not times.tokens or len(times.deltas) < 2:
            raise RuntimeError(f"A stream without an end, or next to no text: {times}")
        return times

    async def round(self, streams: int, tokens: int) -> dict[str, float]:
        """Run ``streams`` streams at once and return the figures of the round, by name."""
        cpu, begun = cpu_of(self.process.pid), time.perf_counter()
        times = await asyncio.gather(*(self.stream(tokens) for _ in range(streams)))
        wall, total = time.perf_counter() - begun, sum(each.tokens for each in times)
        gaps = [gap * 1e3 for each in times for gap in each.gaps]
        return {
            "tokens/s": total / wall,
            "ms to the first token": statistics.median(each.deltas[0] for each in times) * 1e3,
            "ms between deltas, median": statistics.median(gaps),
            "ms between deltas, p99": statistics.quantiles(gaps, n=100, method="inclusive")[98],
            "tokens in a delta": total / sum(len(each.deltas) for each in times),
            "us of CPU in the frontend per token": (cpu_of(self.process.pid) - cpu) * 1e6 / total,
        }


@asynccontextmanager
async def serving(command: Sequence[str], log: Path) -> AsyncGenerator[Serving, None]:
    """Run the server that the command starts for the length of a block; it can import these tests."""
    port = str(free_port())
    own = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            "--host",
            "127.0.0.1",
            "--port",
            port,
            stdout=output,
            stderr=output,
            env=own | QUIET | {"PYTHONPATH": str(ROOT), "VLLM_RUST_FRONTEND_PATH": str(program())},
        )
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
            AsyncExitStack() as closing,
        ):
            await closing.enter_async_context(asyncio.timeout(STARTING))
            url = f"http://127.0.0.1:{port}"
            model = await _model(process, url, client, log)
            await closing.aclose()
            yield Serving(url, model, psutil.Process(process.pid), client)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _model(process: asyncio.subprocess.Process, url: str, client: aiohttp.ClientSession, log: Path) -> str:
    """Wait until the server is up and return the name of its model."""
    while True:
        if process.returncode is not None:
            raise RuntimeError(f"The server did not start: see {log}")
        try:
            async with client.get(f"{url}/v1/models") as answer:
                if answer.status == 200:
                    return str((await answer.json())["data"][0]["id"])
        except aiohttp.ClientConnectionError:
            pass
        await asyncio.sleep(0.5)


def commands(model: str, options: Sequence[str], folder: str) -> dict[str, Sequence[str]]:
    """Return the commands of the servers that are here; vllm-rs starts its engine with this Python."""
    found: dict[str, Sequence[str]] = {
        OURS: (str(SERVE / "penstock"), "serve", model, *options, "--store", f"{folder}/store.sqlite3"),
        PEER: (str(SERVE / "vllm"), "serve", model, *options),
    }
    if rust := program():
        found[RUST] = (str(rust), "serve", model, *options, "--python", sys.executable)
    return found


async def engines(
    model: str, options: Sequence[str], folder: Path, rounds: int, load: tuple[int, int]
) -> dict[str, list[Comparison]]:
    """Compare the servers, by title; ``load`` is the number of streams and the tokens of each.

    A first round warms up.
    """
    streams, tokens = load
    async with AsyncExitStack() as closing:
        store = closing.enter_context(TemporaryDirectory())
        servers = {
            which: await closing.enter_async_context(serving(command, folder / f"engine-{which}.log"))
            for which, command in commands(model, options, store).items()
        }
        found = [
            {which: await server.round(streams, tokens) for which, server in servers.items()} for _ in range(1 + rounds)
        ][1:]
    return {
        f"Beside {beside}": [
            Comparison({"streams": streams}, figure(found, OURS, what), figure(found, which, what), what, beside)
            for what in found[0][OURS]
        ]
        for which, beside in BESIDE.items()
        if which in servers
    }


def figure(rounds: Sequence[Mapping[str, Mapping[str, float]]], which: str, what: str) -> Figure:
    return Figure(tuple(measured[which][what] for measured in rounds))
