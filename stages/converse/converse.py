"""Converse: alternate between the model and its tools until the model is done, a client must act, or a limit is met.

The inner pipeline runs once per turn.  Server-side tool calls run when the turn is over, concurrently if the request
allows it; their frames are yielded as things happen.  The results extend the conversation, which is then rendered
again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.errors import EngineOverloaded
from penstock.pipeline.frames import ConversedFrame, ItemDelta, ParsedFrame, ResolvedRequest
from penstock.stages.converse.exchange import Exchange, Limits
from penstock.stages.services.tools import Toolbox


@dataclass(frozen=True)
class Converse:
    """Let the model that ``inner`` runs use the tools in ``toolbox``; ``clock`` returns monotonic seconds."""

    inner: Pipeline[ResolvedRequest, ParsedFrame]
    toolbox: Toolbox = field(default_factory=Toolbox)
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic

    async def __call__(self, source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ConversedFrame, None]:
        """Yield the frames of all turns of each conversation.

        An error in the first prompt is raised before the first frame, unless MCP frames had to come before the prompt.
        """
        async for conversation in source:
            exchange = Exchange(conversation, self.toolbox, self.limits, self.clock)
            append = exchange.transcript.texts.append
            try:
                async with aclosing(exchange.begin()) as frames:
                    async for frame in frames:
                        yield exchange.noted(frame)
                while (turn := exchange.next_turn()) is not None:
                    async with self._accepted(exchange) as (first_frame, parsed):
                        for passed_frame in turn.feed(first_frame) if first_frame else ():
                            yield exchange.noted(passed_frame)
                        async for frame in parsed:
                            if turn.is_plain and type(frame) is ItemDelta:  # fast path: nearly every frame
                                append(frame.text)
                                yield frame
                            else:
                                for passed_frame in turn.feed(frame):
                                    yield exchange.noted(passed_frame)
                    async with aclosing(exchange.run(turn)) as frames:
                        async for frame in frames:
                            yield exchange.noted(frame)
            finally:
                await exchange.close()

    @asynccontextmanager
    async def _accepted(
        self, exchange: Exchange
    ) -> AsyncGenerator[tuple[ParsedFrame | None, AsyncIterator[ParsedFrame]], None]:
        """Open the next turn; return its first frame, or None if there is none, and the stream of the rest.

        A response that has begun can no longer be refused, so it retries until the engine has room for its turn.
        Raises `EngineOverloaded` if the response has not begun.
        """
        while True:
            async with self.inner.open(source_of([exchange.conversation])) as parsed:
                try:
                    first_frame = await anext(parsed, None)
                except EngineOverloaded:
                    if not exchange.has_begun:
                        raise
                else:
                    yield first_frame, parsed
                    return
            await asyncio.sleep(self.limits.retry_seconds)
