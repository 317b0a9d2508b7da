"""The time to read the items of a long request: its body, and what they become in the conversation.

Figures are the least CPU time of the rounds, in milliseconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, TypeAlias

from penstock.pipeline.protocol.params.validation import read_request
from penstock.stages.normalize.input_items import InputReader
from penstock.stages.normalize.toolset import ToolsetBuilder

COUNT, ROUNDS = 10_000, 15

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

REQUESTS: dict[str, list[Json]] = {"messages": [MESSAGE], "turns of an agent": [MESSAGE, THOUGHT, CALL, OUTPUT, ANSWER]}
"""The items that a request repeats."""


@dataclass(frozen=True)
class Cost:
    """Milliseconds of CPU for the body, and for its items."""

    body: float
    items: float

    @property
    def both(self) -> float:
        return self.body + self.items


def costs(count: int = COUNT, rounds: int = ROUNDS) -> dict[str, Cost]:
    """Return the cost of a request with ``count`` items, by what it repeats."""
    return {name: _least(list(islice(cycle(items), count)), rounds) for name, items in REQUESTS.items()}


def _least(items: Sequence[Json], rounds: int) -> Cost:
    body = json.dumps({"input": items}).encode()
    return min((_cost(body) for _ in range(rounds)), key=lambda cost: cost.both)


def _cost(body: bytes) -> Cost:
    started = time.process_time_ns()
    request = read_request(body)
    between = time.process_time_ns()
    InputReader("input", "1", {}, ToolsetBuilder()).read(request.input_items, ())
    return Cost((between - started) / 1e6, (time.process_time_ns() - between) / 1e6)


def reading_table(found: Mapping[str, Cost]) -> str:
    lines = ["items               body, ms   items, ms   both, ms"]
    lines += [f"{name:18s}{cost.body:10.1f}{cost.items:12.1f}{cost.both:11.1f}" for name, cost in found.items()]
    return "\n".join(lines)
