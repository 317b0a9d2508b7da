"""The cost of a token in parts that add up: servers that do more and more of what penstock does, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.core import Case, Window
from tests.bench.loopback import SECONDS, STEADY, Server, all_serving, cost
from tests.bench.paced import RATE

KINDS = {
    "sent": ("sent",),
    "bare": ("bare",),
    "engine": ("engine", *STEADY),
    "stages": ("stages", *STEADY),
    "ours": ("ours", *STEADY),
}
"""The servers: name, kind and options."""

STEPS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("a write to the transport: the kernel's send, by uvloop", "sent", {}),
    ("a task that waits for the token and wakes up, and aiohttp's write", "bare", {}),
    ("vLLM's `AsyncLLM`, and `VllmEngine`, which reads it", "engine", {}),
    ("the stages from generate to emit, and the encoding of events", "stages", {}),
    ("the run and its log, the request's middleware, and the keep-alive", "ours", {"store": False}),
    ("the stored response, and its event log", "ours", {"store": True}),
)
"""What each server does beyond the one before it; its name, and the fields of its requests."""


async def step_costs(folder: Path, rounds: int) -> list[list[float]]:
    """Return the microseconds of CPU per token of each step, of each round; a first round warms up."""
    async with all_serving(KINDS, folder) as started:
        servers = dict(zip(KINDS, started, strict=True))
        found = [[await _cost(servers[name], body) for _, name, body in STEPS] for _ in range(1 + rounds)]
    return [list(costs) for costs in zip(*found[1:], strict=True)]


async def _cost(server: Server, body: Mapping[str, Any]) -> float:
    case = Case(100, 1_000)
    async with server.running(case, **body):
        return await cost(server, case, Window(round(SECONDS * RATE), 1, RATE))


def budget_table(costs: Sequence[Sequence[float]]) -> str:
    whole = [statistics.median(rounds) for rounds in costs]
    parts = [after - before for before, after in zip([0.0, *whole], whole, strict=False)]
    width = max(len(what) for what, *_ in STEPS)
    load = "100 streams at 50 tokens/s, --stream-interval 1"
    lines = [f"{load:{width}s}{'us per token':>14s}{'part':>7s}{'up to here':>16s}"]
    for (what, *_), part, rounds in zip(STEPS, parts, costs, strict=True):
        span = f"{min(rounds):.1f} to {max(rounds):.1f}"
        lines.append(f"{what:{width}s}{part:14.1f}{part / whole[-1]:7.0%}{span:>16s}")
    return "\n".join([*lines, f"{'the whole server':{width}s}{whole[-1]:14.1f}{1:7.0%}{'':16s}"])
