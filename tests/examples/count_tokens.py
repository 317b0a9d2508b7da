"""Count the tokens that the model writes, by the kind of their item, as Prometheus metrics.

A stage after `parse` sees the tokens of each item at its `ItemClosed`. Tokens outside whole items count as `Other`: the
markup at the end of a turn, and an item that was cut or repaired. The metrics are at
`http://127.0.0.1:9464/metrics`. `prometheus_client` comes with vLLM.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator
from functools import cache
from typing import Any

import prometheus_client

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import ItemClosed, ItemOpened, ParsedFrame, TurnFinished

TOKENS = prometheus_client.Counter("penstock_output_tokens", "Tokens that the model wrote.", ["kind"])


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


@cache  # `install` may run several times
def serve_metrics() -> None:
    prometheus_client.start_http_server(int(os.environ.get("METRICS_PORT", "9464")), "127.0.0.1")


def install(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    serve_metrics()
    return pipeline.insert_after("parse", "count_tokens", count)
