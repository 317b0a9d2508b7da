"""Servers over real engines: `vllm serve` beside `penstock serve`, each with its own engine, measured in turns.

Both run at the same time, so on one GPU the engine options must give each a share of the memory.  CPU time counts
the process that clients connect to, without its children, which run the engine cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import psutil

from tests.bench.figures import Comparison, Figure
from tests.bench.loopback import QUIET, STARTING
from tests.support.paths import ROOT
from tests.support.processes import free_port

QUESTION = "Never stop talking."
"""The tiny gpt-oss is trained to answer this with an endless text."""

SERVE = Path(sys.executable).parent
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
        name, _, data = event.partition(b"\n")
        if name.endswith(b".delta"):
            self.deltas.append(at)
        elif name.endswith((b"response.completed", b"response.incomplete")):
            self.tokens = json.loads(data.removeprefix(b"data: "))["response"]["usage"]["output_tokens"]


@dataclass(frozen=True)
class Serving:
    url: str
    model: str
    process: psutil.Process
    client: aiohttp.ClientSession

    async def stream(self, tokens: int) -> StreamTimes:
        times, begun, rest = StreamTimes(), time.perf_counter(), b""
        body = {"model": self.model, "input": QUESTION, "stream": True, "max_output_tokens": tokens}
        async with self.client.post(f"{self.url}/v1/responses", json=body, timeout=PATIENCE) as answer:
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
        cpu, begun = self._cpu, time.perf_counter()
        times = await asyncio.gather(*(self.stream(tokens) for _ in range(streams)))
        wall, total = time.perf_counter() - begun, sum(each.tokens for each in times)
        gaps = [gap * 1e3 for each in times for gap in each.gaps]
        return {
            "tokens/s": total / wall,
            "ms to the first token": statistics.median(each.deltas[0] for each in times) * 1e3,
            "ms between deltas, median": statistics.median(gaps),
            "ms between deltas, p99": statistics.quantiles(gaps, n=100, method="inclusive")[98],
            "tokens in a delta": total / sum(len(each.deltas) for each in times),
            "us of CPU in the frontend per token": (self._cpu - cpu) * 1e6 / total,
        }

    @property
    def _cpu(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


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
            env=own | QUIET | {"PYTHONPATH": str(ROOT)},
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


async def engines(
    model: str, options: Sequence[str], folder: Path, rounds: int, load: tuple[int, int]
) -> list[Comparison]:
    """Compare both servers; ``load`` is the number of streams and the tokens of each.  A first round warms up."""
    streams, tokens = load
    async with AsyncExitStack() as closing:
        store = f"{closing.enter_context(TemporaryDirectory())}/store.sqlite3"
        commands = {
            "penstock": (str(SERVE / "penstock"), "serve", model, *options, "--store", store),
            "vllm": (str(SERVE / "vllm"), "serve", model, *options),
        }
        ours, peer = [
            await closing.enter_async_context(serving(command, folder / f"engine-{name}.log"))
            for name, command in commands.items()
        ]
        found = [(await ours.round(streams, tokens), await peer.round(streams, tokens)) for _ in range(1 + rounds)][1:]
    compared = []
    for what in found[0][0]:
        mine, other = (Figure(tuple(side[what] for side in sides)) for sides in zip(*found, strict=True))
        compared.append(Comparison({"streams": streams}, mine, other, what))
    return compared
