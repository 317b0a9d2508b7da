"""CPU of a token with several frontends, all processes included, over that with one: both servers run, in turns."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from yarl import URL

from penstock.services.engines.scripted import Script, ScriptedEngine
from tests.bench.core import SETTLING, recorded_text
from tests.bench.engines import Serving, serving
from tests.bench.loopback import CORES, SERVE
from tests.bench.paced import RATE

STREAMS = 100
TOKENS = 200
COUNTS = (1, 2)


def engine(_: object) -> ScriptedEngine:
    """Return an engine of `TOKENS` tokens a stream, at `RATE`."""
    text = recorded_text()
    return ScriptedEngine(Script((*text.answer(), *text.run(TOKENS)), latency=1 / RATE, reason="length"))


async def frontend_costs(folder: Path, rounds: int) -> dict[int, list[float]]:
    """Return the microseconds per token of each round, by number of frontends; a first round warms up."""
    found: dict[int, list[float]] = {count: [] for count in COUNTS}
    async with AsyncExitStack() as closing:
        stores = Path(closing.enter_context(TemporaryDirectory()))
        servers = {
            count: await closing.enter_async_context(
                serving(_command(count, stores), folder / f"frontends-{count}.log")
            )
            for count in COUNTS
        }
        for _ in range(1 + rounds):
            for count, server in servers.items():
                found[count].append(await _cost(server))
    return {count: costs[1:] for count, costs in found.items()}


def _command(count: int, stores: Path) -> Sequence[str]:
    chosen = ("--engine", f"{__file__}:{engine.__name__}", "--frontends", str(count), "--no-sandbox")
    return (str(SERVE / "penstock"), "serve", *chosen, "--store", str(stores / f"{count}.sqlite3"))


async def _cost(server: Serving) -> float:
    before, body = _used(server.process), json.dumps({"input": "Hi", "stream": True})
    command = (sys.executable, "-m", "tests.bench.readers", str(URL(server.url).port), str(STREAMS), body)
    readers = await asyncio.create_subprocess_exec(*command)
    os.sched_setaffinity(readers.pid, CORES[-1:])
    if await readers.wait():
        raise RuntimeError("A client was refused, or its stream broke off")
    await asyncio.sleep(SETTLING)
    return (_used(server.process) - before) * 1e6 / STREAMS / TOKENS


def _used(server: psutil.Process) -> float:
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def frontend_table(costs: Mapping[int, Sequence[float]]) -> str:
    lines = [f"{'frontends':>9s}{'us per token, all processes':>30s}{'to one':>9s}"]
    for count, rounds in costs.items():
        ratio = statistics.median(cost / one for cost, one in zip(rounds, costs[1], strict=True))
        lines.append(f"{count:9d}{statistics.median(rounds):30.1f}{ratio:9.2f}")
    return "\n".join(lines)
