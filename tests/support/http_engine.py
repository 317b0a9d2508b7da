"""An engine over fake servers, and what it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from pipeline.frames import EngineFrame, GenerationFinished, Prompt, Sampling, TokenChunk, TokenLogprob
from stages.generate.http import HttpEngine, start_http
from tests.support.fake_vllm import FakeVllm, fakes
from tests.support.stored_responses import response


def prompt(**fields: Any) -> Prompt:
    """A prompt for the model of the fakes; ``max_tokens`` and the like are of its sampling."""
    names = Sampling.__struct_fields__
    sampling: dict[str, Any] = {"max_tokens": 100} | {name: fields.pop(name) for name in names if name in fields}
    asked = response(fields.pop("id", "resp_1"), model=fields.pop("model", "tiny"))
    known: dict[str, Any] = {"token_ids": (1, 2, 3), "stop_token_ids": (200002,)}
    return Prompt(response=asked, input=(), sampling=Sampling(0.0, 1.0, **sampling), **(known | fields))


@asynccontextmanager
async def engine_over(*servers: FakeVllm, **options: Any) -> AsyncGenerator[HttpEngine, None]:
    """The engine over those servers, which listen as long as it is there."""
    async with fakes(*servers):
        engine = await start_http([server.url for server in servers], **{"interval": 0.05, **options})
        try:
            yield engine
        finally:
            await engine.close()


async def generate(engine: HttpEngine, asked: Prompt) -> list[EngineFrame]:
    async with engine.open(asked) as frames:
        return [frame async for frame in frames]


def token_ids(frames: list[EngineFrame]) -> list[int]:
    return [token for frame in frames if isinstance(frame, TokenChunk) for token in frame.token_ids]


def logprobs(frames: list[EngineFrame]) -> list[TokenLogprob]:
    return [logprob for frame in frames if isinstance(frame, TokenChunk) for logprob in frame.logprobs]


def last(frames: list[EngineFrame]) -> GenerationFinished:
    assert isinstance(frames[-1], GenerationFinished)
    return frames[-1]


async def until(condition: Any) -> None:
    """Wait for what comes about by itself."""
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)
