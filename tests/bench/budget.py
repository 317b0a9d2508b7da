"""The cost of a token and of an open stream, in parts that add up: servers that do more and more of penstock's work."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.core import Case, Window
from tests.bench.loopback import BARE, OURS, SECONDS, Server, cost, open_stream, servers
from tests.bench.paced import RATE

KINDS = ("sent", BARE, "engine", "stages", OURS)
"""The kinds of servers."""

TOKEN: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("a write to the transport: the kernel's send, by uvloop", "sent", {}),
    ("vLLM's `AsyncLLM`, and `VllmEngine`, which passes it on", "engine", {}),
    ("the machines of the stages, and the encoding of events", "stages", {}),
    ("the run and its log, the request's middleware, and the keep-alive", OURS, {"store": False}),
    ("the stored response, and its event log", OURS, {"store": True}),
)
"""What each server does for a token beyond the one before it; its name, and the fields of its requests."""

STREAM = (
    ("the connection, the request and its task: aiohttp", BARE),
    ("the request of vLLM's `AsyncLLM`, and the reading of `VllmEngine`", "engine"),
    ("the stages, their machines, and the facts of the request", "stages"),
    ("the run and its log, the request's middleware, the store", OURS),
)
"""What each server has in memory for an open stream beyond the one before it; its name."""


@dataclass(frozen=True)
class Budget:
    """The figures of the steps of `TOKEN`, in microseconds and of each round, and of `STREAM`, in KB."""

    token: Sequence[Sequence[float]]
    stream: Sequence[float]


async def measured_budget(folder: Path, rounds: int, streams: int) -> Budget:
    """Measure both: memory first, as only fresh servers show it; then the cost of a token, after a round to warm up."""
    async with servers(folder, KINDS) as every:
        memory = [await open_stream(every[name], streams) / 1024 for _, name in STREAM]
        found = [[await _cost(every[name], body) for _, name, body in TOKEN] for _ in range(1 + rounds)]
    return Budget([list(costs) for costs in zip(*found[1:], strict=True)], memory)


async def _cost(server: Server, body: Mapping[str, Any]) -> float:
    case = Case(100, 1_000)
    async with server.running(case, **body):
        return await cost(server, case, Window(round(SECONDS * RATE), 1, RATE))


def token_budget(costs: Sequence[Sequence[float]]) -> str:
    load = "100 streams at 50 tokens/s"
    return _table(load, "us per token", [what for what, *_ in TOKEN], costs)


def stream_budget(sizes: Sequence[float]) -> str:
    return _table("an open stream", "KB", [what for what, _ in STREAM], [[size] for size in sizes])


def _table(load: str, unit: str, names: Sequence[str], figures: Sequence[Sequence[float]]) -> str:
    """Return a line for each step; ``figures`` are those of each server and round, whose differences are the parts."""
    whole = [statistics.median(rounds) for rounds in figures]
    parts = [after - before for before, after in zip([0.0, *whole], whole, strict=False)]
    width = max(map(len, names))
    lines = [f"{load:{width}s}{unit:>14s}{'part':>7s}{'up to here':>16s}"]
    for what, part, rounds in zip(names, parts, figures, strict=True):
        span = f"{min(rounds):.1f} to {max(rounds):.1f}" if len(rounds) > 1 else f"{rounds[0]:.1f}"
        lines.append(f"{what:{width}s}{part:14.1f}{part / whole[-1]:7.0%}{span:>16s}")
    return "\n".join([*lines, f"{'the whole server':{width}s}{whole[-1]:14.1f}{1:7.0%}{'':16s}"])
