"""The CPU time to read a request with many items: into a conversation, into vLLM's request, and as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any, TypeAlias

from penstock.pipeline.protocol.params.validation import read_request
from penstock.stages.normalize.input_items import InputReader
from penstock.stages.normalize.toolset import ToolsetBuilder
from tests.bench.figures import JSON, VLLM, Comparison, Figure

COUNT = 10_000
AGENT = "turns of an agent"

Json: TypeAlias = dict[str, Any]

MESSAGE: Json = {"role": "user", "content": "Hi"}
ANSWER = {
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}], "status": None}
CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}", "status": "completed"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "5 degrees, rain"}

REQUESTS: dict[str, list[Json]] = {"messages": [MESSAGE], AGENT: [MESSAGE, THOUGHT, CALL, OUTPUT, ANSWER]}
"""The items that a request repeats."""


def reading_costs(rounds: int, count: int = COUNT) -> list[Comparison]:
    """Compare the milliseconds of a request with ``count`` items, by what it repeats; a first round warms up."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: PLC0415 - takes seconds

    def read(body: bytes) -> None:
        request = read_request(body)
        InputReader("input", "1", {}, ToolsetBuilder()).read(request.input_items, ())

    readers = (read, lambda body: ResponsesRequest.model_validate(json.loads(body)), json.loads)
    compared = []
    for what, items in REQUESTS.items():
        body = json.dumps({"model": "m", "input": list(islice(cycle(items), count))}).encode()
        found = [[_cost(reader, body) for reader in readers] for _ in range(1 + rounds)][1:]
        ours, peer, least = (Figure(tuple(figures)) for figures in zip(*found, strict=True))
        load = {"items": count}
        compared += [Comparison(load, ours, other, what, name) for other, name in ((peer, VLLM), (least, JSON))]
    return compared


def _cost(reader: Callable[[bytes], object], body: bytes) -> float:
    started = time.process_time_ns()
    reader(body)
    return (time.process_time_ns() - started) / 1e6
