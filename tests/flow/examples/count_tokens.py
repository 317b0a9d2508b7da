"""Count the tokens that the model writes on each channel, as Prometheus metrics.

    METRICS_PORT=9464 penstock serve --with count_tokens.py:install
    curl http://127.0.0.1:9464/metrics

It needs ``prometheus_client``, which vLLM installs.

Tokens outside whole items, such as the markup at the end of a turn or an item that was cut, count as ``other``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from functools import cache

import prometheus_client

from penstock.pipeline import frames
from penstock.pipeline.core import Pipeline
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse

TOKENS = prometheus_client.Counter("penstock_output_tokens", "Tokens that the model wrote.", ["channel"])


async def count(source: AsyncIterator[frames.ParsedFrame]) -> AsyncGenerator[frames.ParsedFrame, None]:
    """Pass every frame on; count the tokens of a turn by channel, and report them at its end."""
    channel, written = "", Counter[str]()
    async for frame in source:
        match frame:
            case frames.ReasoningOpened():
                channel = "analysis"
            case frames.MessageOpened(phase):
                channel = "commentary" if phase == "commentary" else "final"
            case frames.ItemClosed(token_ids=token_ids):
                written[channel] += len(token_ids)
            case frames.TurnFinished(output_tokens=total):
                written["other"] = max(0, total - written.total())
                for name, number in written.items():
                    TOKENS.labels(name).inc(number)
                channel, written = "", Counter()
            case frames.GenerationStarted() | frames.ItemDelta() | frames.AnnotationAdded():
                pass
            case _:  # any kind of call
                channel = "commentary"
        yield frame


@cache
def serve_metrics() -> None:
    """Serve the metrics, once in this process: `install` may run several times."""
    prometheus_client.start_http_server(int(os.environ.get("METRICS_PORT", "9464")), "127.0.0.1")


def install(pipeline: Pipeline[CreateResponse, ResponseEvent]) -> Pipeline[CreateResponse, ResponseEvent]:
    serve_metrics()
    return pipeline.insert_after("parse", "count_tokens", count)
