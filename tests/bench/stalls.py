"""The longest time for which a single request blocks the event loop, and with it all other requests."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.services.engines.scripted import Script, ScriptedEngine
from tests.support.server import running_server

ROUNDS = 5

REFUSED = "100,000 bad items"


def large_bodies() -> dict[str, dict[str, Any]]:
    """Return requests that are slow to read, each named by its large part."""
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(30_000)}}
    tools = [{"type": "function", "name": f"f{number}", "parameters": {"type": "object"}} for number in range(5_000)]
    return {
        "nothing (idle loop)": {"input": "x"},
        "1 MB of one letter": {"input": "a" * 10**6},
        "1 MB of words": {"input": "lorem ipsum " * 83_000},
        "10,000 short messages": {"input": [{"role": "user", "content": "Hi"}] * 10_000},
        "a tool schema of 1 MB": {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": schema}]},
        "5,000 small tools": {"input": "x", "tools": tools},
        REFUSED: {"input": [{}] * 100_000},
    }


async def longest_gap(body: dict[str, Any], expected: int, folder: Path) -> float:
    """Return the longest time, in milliseconds, for which one request blocked the loop."""
    encoding = load_encoding()
    engine = ScriptedEngine(Script(encoding.encode_markup("<|channel|>final<|message|>Hi<|return|>")), 10_000_000)
    gaps: list[float] = []

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append((now - last) * 1e3 - 1)
            last = now

    async with running_server(engine, folder, max_body_bytes=2**24) as served:
        await served.stream({"input": "warm up"})
        data, headers = json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
        ticking = asyncio.create_task(tick())
        async with served.client.post(f"{served.url}/v1/responses", data=data, headers=headers) as answer:
            await answer.read()
        ticking.cancel()
        if answer.status != expected:
            raise RuntimeError(f"The server answered {answer.status}: {await answer.text()}")
    return max(gaps)


async def stalls(rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds by request: the least of some rounds, as the machine has pauses of its own."""
    least = {}
    for name, body in large_bodies().items():
        gaps = []
        for _ in range(rounds):
            with TemporaryDirectory() as folder:
                gaps.append(await longest_gap(body, 400 if name == REFUSED else 200, Path(folder)))
        least[name] = min(gaps)
    return least


def stall_table(least: dict[str, float]) -> str:
    lines = [f"{'one request with':26s}longest stall of the loop, ms"]
    return "\n".join([*lines, *(f"{name:26s}{gap:29.1f}" for name, gap in least.items())])
