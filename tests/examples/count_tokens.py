"""Count the tokens that the model writes, by the kind of their item, as a metric of your own at `/metrics`.

A stage after `parse` sees the tokens of each item at its `ItemClosed`. Tokens outside whole items count as `Other`: the
markup at the end of a turn, and an item that was cut or repaired.

To count by the user, read `frame.facts` of the first frame of a turn, `GenerationStarted`: `origin.key_name` is the
name of the API key, and `response.user` what the client sent as `user`. In a test, `turn("hel", "lo",
key_name="laptop", user="ann")` of `penstock.testing` has both, and `prometheus_client.REGISTRY.get_sample_value` reads
the metric. Each value of a label costs memory: keys are few, but clients choose `user`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import prometheus_client

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import ItemClosed, ItemOpened, ParsedFrame, TurnFinished

TOKENS = prometheus_client.Counter("written_tokens", "Tokens that the model wrote.", ["kind"])


async def count(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    kind, counted = "", 0
    async for frame in source:
        if isinstance(frame, ItemOpened):
            kind = type(frame).__name__.removesuffix("Opened")  # Reasoning, Message, FunctionCall, ...
        elif isinstance(frame, ItemClosed):
            TOKENS.labels(kind).inc(len(frame.token_ids))
            counted += len(frame.token_ids)
        elif isinstance(frame, TurnFinished):
            TOKENS.labels("Other").inc(max(0, frame.output_tokens - counted))
            counted = 0
        yield frame


def install(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline.insert_after("parse", "count_tokens", count)
