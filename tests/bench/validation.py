"""The cost of validating an agent's request, and the longest time for which that blocks the event loop."""

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
from penstock.stages.models.harmony.vocabulary import load_encoding
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


async def validation(normalize: Pipeline[CreateResponse, ResolvedRequest], body: bytes) -> tuple[float, float]:
    """Return milliseconds of CPU from body to conversation: the longest time without a yield, and the total."""
    holds: list[float] = []

    async def tick() -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0)
            now = time.process_time()
            holds.append((now - last) * 1e3)
            last = now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    started = time.process_time()
    async with normalize.open(source_of([await read_request(body)])) as conversations:
        await anext(conversations)
    total = (time.process_time() - started) * 1e3
    await asyncio.sleep(0)
    ticking.cancel()
    return max(holds), total


async def validation_figures() -> str:
    body = json.dumps(agent_body()).encode()
    tokens = len(load_encoding().encode(body.decode()))
    normalize = Pipeline.start("normalize", Normalize(Store(Nowhere()), ("recorded",)))
    figures = [await validation(normalize, body) for _ in range(ROUNDS)]
    held, total = (statistics.median(column) for column in zip(*figures, strict=True))
    return f"understanding {len(body):,} bytes ({tokens:,} tokens): {total:.1f} ms, at most {held:.1f} ms at a time"
