"""What it costs to watch a server: metrics and traces per token, and the time of a scrape.

The engine answers at once, so that all time is the server's.  The clients, and the collector of the traces, run in
other processes; CPU time is that of this one, all threads included.  The ways take turns.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import aiohttp
from aiohttp import web
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from yarl import URL

from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.services.tracing import exporting
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.bench.figures import over
from tests.bench.serving import STREAMS, TOKENS, talking
from tests.bench.sockets import BODY, Figures, spent, without_first
from tests.support.processes import PATIENCE, free_port
from tests.support.server import COUNT, running_server

NOTHING, METRICS, TRACES = "neither", "metrics", "metrics and traces"

OPEN = 1_000
"""Streams that are open during a scrape."""


@contextmanager
def without_metrics() -> Iterator[None]:
    """Have no metric count anything, for the length of a block."""

    def nothing(*_: object, **__: object) -> None:
        """Do nothing."""

    with (
        patch.multiple(MetricWrapperBase, labels=lambda self, *_, **__: self, _raise_if_not_observable=nothing),
        patch.multiple(Counter, inc=nothing),
        patch.multiple(Gauge, inc=nothing, dec=nothing, set=nothing),
        patch.multiple(Histogram, observe=nothing),
    ):
        yield


@asynccontextmanager
async def collector() -> AsyncGenerator[str, None]:
    """Run a collector in a process of its own, and yield its URL."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, str(port))
    try:
        url = f"http://127.0.0.1:{port}/v1/traces"
        async with aiohttp.ClientSession() as client, asyncio.timeout(PATIENCE):
            while True:
                try:
                    async with client.post(url):
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)
        yield url
    finally:
        process.terminate()
        await process.wait()


async def watching_costs(rounds: int, tokens: int = TOKENS) -> Figures:
    """Return microseconds of CPU per token, with `STREAMS` streams at once; a first round warms up and is dropped."""
    measured: Figures = {NOTHING: [], METRICS: [], TRACES: []}
    with TemporaryDirectory() as folder:
        async with running_server(talking(tokens), Path(folder)) as served, collector() as url:
            for _ in range(1 + rounds):
                for name, values in measured.items():
                    tracing: AbstractAsyncContextManager[None] = exporting(
                        OTLPSpanExporter(url) if name == TRACES else None
                    )
                    with without_metrics() if name == NOTHING else nullcontext():
                        async with tracing:
                            cpu, _ = await spent(served, "readers", str(STREAMS), BODY)
                    values.append(cpu * 1e6 / (STREAMS * tokens))
    return without_first(measured)


async def scrape_times(scrapes: int, streams: int = OPEN) -> list[float]:
    """Return the milliseconds of scrapes while streams are open that wait for their next token."""
    engine = ScriptedEngine(Script(load_encoding().encode_markup(COUNT), latency=600))
    times = []
    with TemporaryDirectory() as folder:
        async with running_server(engine, Path(folder)) as served:
            command = (sys.executable, "-m", "tests.bench.readers", str(URL(served.url).port), str(streams), BODY)
            clients = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
            try:
                async with asyncio.timeout(PATIENCE):
                    while engine.running < streams:
                        await asyncio.sleep(0.05)
                async with aiohttp.ClientSession() as client:
                    for _ in range(scrapes):
                        started = time.perf_counter()
                        async with client.get(f"{served.url}/metrics") as answer:
                            await answer.read()
                        times.append((time.perf_counter() - started) * 1e3)
            finally:
                clients.kill()
                await clients.wait()
    return times


def watching_table(costs: Figures) -> str:
    lines = [f"{f'{STREAMS} streams, 1 token per step, not stored':48s}us per token   to neither"]
    for name, values in costs.items():
        lines.append(
            f"{name:48s}{statistics.median(values):12.2f}{statistics.median(over(costs, name, NOTHING)):13.3f}"
        )
    return "\n".join(lines)


async def _collect(_: web.Request) -> web.Response:
    return web.Response()


if __name__ == "__main__":
    app = web.Application(client_max_size=2**26)
    app.add_routes([web.post("/v1/traces", _collect)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
