"""Stages of an operator that pass every frame on, one at each junction, so that a server checks all its frames."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

from penstock.pipeline.core import Pipeline
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse

Frame = TypeVar("Frame")


async def passed(source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
    async for frame in source:
        yield frame


def install(pipeline: Pipeline[CreateResponse, ResponseEvent]) -> Pipeline[CreateResponse, ResponseEvent]:
    names = [*pipeline.names()]
    pipeline = pipeline.insert_before(names[0], "arriving", passed)
    for name in names:
        pipeline = pipeline.insert_after(name, f"after_{name}", passed)
    return pipeline
