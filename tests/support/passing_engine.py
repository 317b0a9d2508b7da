"""An engine that passes recorded tokens on as vLLM in this process does, over the hot path of a response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.pipeline.frames import EngineFrame, Prompt, TokenChunk
from penstock.pipeline.hot_path import current
from penstock.services.engines.token_replay import TokenReplayEngine
from penstock.stages.models.vllm_private import Unread
from tests.support.paths import HARMONY

LEAST = 15
"""Tokens of an answer that are too few for some APIs."""


@dataclass
class PassingEngine:
    """Replay the tokens at ``path`` in order; ``passed`` of them have gone over hot paths.

    With ``then``, a response gets a chunk for each token that it may have more than `LEAST`: then that is called, and
    the stream ends.
    """

    path: Path = HARMONY / "greeting/tokens.jsonl"
    models: tuple[str, ...] = ("tiny",)
    context_length: int = 131_072
    vocabulary_size: int = 300_000
    is_alive: bool = True
    scores_prompts: bool = True
    scores_tokens: bool = True
    passed: int = 0
    then: Callable[[], Awaitable[object]] | None = None

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        async with (
            TokenReplayEngine(self.path).open(prompt) as recorded,
            aclosing(self._cut(recorded, (prompt.facts.sampling.max_tokens or 0) - LEAST)) as cut,
            aclosing(self._frames(cut)) as frames,
        ):
            yield frames

    async def _cut(self, recorded: AsyncIterator[EngineFrame], most: int) -> AsyncGenerator[EngineFrame, None]:
        async for frame in recorded:
            yield frame
            most -= 1
            if self.then and not most:
                await self.then()
                return

    async def _frames(self, recorded: AsyncIterator[EngineFrame]) -> AsyncGenerator[EngineFrame, None]:
        unread, reader, has_begun = Unread(1, current()), Reader(), False
        async for frame in recorded:
            if not has_begun or not isinstance(frame, TokenChunk) or frame.logprobs:
                has_begun = True
                yield frame
                continue
            unread += frame.token_ids
            asyncio.get_running_loop().call_soon(unread.pass_on, reader)
            unread.is_awaited = True
            await asyncio.sleep(0)  # the callback runs meanwhile
            unread.is_awaited = False
            if reader.error:
                raise reader.error
            reader.ready.clear()
            if unread:
                yield TokenChunk(unread.take()[0], cached_tokens=frame.cached_tokens)
        self.passed += unread.passed

    async def cancel(self, response_id: str) -> bool:
        return False

    async def stop(self) -> None:
        self.is_alive = False

    async def close(self) -> None:
        self.is_alive = False


class Reader(SimpleNamespace):
    """What wakes the reader of a request, as vLLM's collector does."""

    def __init__(self) -> None:
        super().__init__(ready=asyncio.Event(), error=None)

    def put(self, error: Any) -> None:
        self.error = error
