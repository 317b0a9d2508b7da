"""The time that requests take from body to conversation, and the longest time for which that blocks the event loop."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any

from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.validation import read_request
from penstock.stages.normalize.normalize import Normalize
from penstock.stages.services.store.database import Nowhere
from penstock.stages.services.store.store import Store

ROUNDS = 15


def agent_body() -> dict[str, Any]:
    """Return a request of an agent after fifty turns: 200 items, and 40 tools with schemas."""
    words = (
        "Everything that the previous command printed is repeated here, because nobody knows yet what matters. " * 10
    )
    parameters = {
        "type": "object",
        "properties": {
            f"field{number}": {"type": ["string", "null"], "description": words[:90], "enum": ["a", "b", None]}
            for number in range(8)
        },
        "required": [f"field{number}" for number in range(8)],
        "additionalProperties": False,
    }
    turn = (
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": words}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": words}]},
        {"type": "function_call", "call_id": "c", "name": "tool0", "arguments": json.dumps({"field0": words})},
        {"type": "function_call_output", "call_id": "c", "output": words},
    )
    tools = [
        {"type": "function", "name": f"tool{number}", "description": words, "parameters": parameters, "strict": True}
        for number in range(40)
    ]
    return {"input": turn * 50, "tools": tools, "instructions": words * 4, "tool_choice": "auto"}


def long_body() -> dict[str, Any]:
    """Return a request of some ten megabytes, with 12,000 items."""
    words = "lorem ipsum " * 80
    turn = (
        {"role": "user", "content": [{"type": "input_text", "text": words}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": words}]},
        {"type": "function_call", "call_id": "c", "name": "tool0", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": words},
    )
    return {"input": turn * 3_000}


async def validation(normalize: Pipeline[CreateResponse, ResolvedRequest], body: bytes) -> tuple[float, float]:
    """Return milliseconds from body to conversation, and the longest stall of the loop in another run."""
    started = time.perf_counter()
    await _resolve(normalize, body)
    total = (time.perf_counter() - started) * 1e3
    stalls: list[float] = []

    async def tick() -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            stalls.append((time.perf_counter() - started) * 1e3 - 1)

    ticking = asyncio.create_task(tick())
    await _resolve(normalize, body)
    await asyncio.sleep(0.002)
    ticking.cancel()
    return total, max(stalls)


async def _resolve(normalize: Pipeline[CreateResponse, ResolvedRequest], body: bytes) -> None:
    async with normalize.open(source_of([await read_request(body)])) as requests:
        await anext(requests)


async def validation_figures() -> str:
    """Return the medians as text, a line for each body."""
    normalize = Pipeline.start("normalize", Normalize(Store(Nowhere()), ("recorded",)))
    lines = []
    for content in ({"input": "Hi"}, agent_body(), long_body()):
        body = json.dumps(content).encode()
        figures = [await validation(normalize, body) for _ in range(ROUNDS)]
        total, stall = (statistics.median(column) for column in zip(*figures, strict=True))
        lines.append(f"understanding {len(body):,} bytes: {total:.1f} ms, at most {stall:.1f} ms at a time")
    return "\n".join(lines)
