"""Compact conversations without the model: keep its last answers, and list the calls of its tools.

The stage takes the place of `summarize`, which gets each request of a turn. Only those of a compaction are changed:
with a `summary`, the model writes none.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import ResolvedRequest, with_summary
from penstock.pipeline.protocol.items import FunctionCall, Message

ANSWERS, CALLS = 3, 20


def summary_of(request: ResolvedRequest) -> str:
    answers = [item.text for item in request.items if isinstance(item, Message) and item.role == "assistant"]
    calls = [f"{item.name}({item.arguments})" for item in request.items if isinstance(item, FunctionCall)]
    lines = ["Last answers:", *answers[-ANSWERS:], "Calls that were made:", *calls[-CALLS:]]
    return "\n".join(lines)


async def summarize(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ResolvedRequest, None]:
    async for request in source:
        yield with_summary(request, summary_of(request)) if request.facts.purpose.summarizes else request


def install(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline.replace("summarize", summarize)
