"""Converse: the model and its tools take turns, until the model is done, the client's turn has come, or a limit.

The inner pipeline runs once per turn.  Calls that the server runs are run when a turn is over, all at the same time
where the request allows it; the frames of each say what really happens, when it happens.  What they returned extends
the conversation, which is then rendered again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import EngineOverloaded
from penstock.pipeline.frames import Conversation, ConversedFrame, ItemDelta, ParsedFrame
from penstock.pipeline.recordings.format import replay
from penstock.stages.converse.exchange import Exchange, Limits
from penstock.stages.services.tools import Toolbox


@dataclass(frozen=True)
class Converse:
    """Lets the model that ``inner`` runs use what is in ``toolbox``; ``clock`` counts seconds from anywhere."""

    inner: Pipeline[Conversation, ParsedFrame]
    toolbox: Toolbox = field(default_factory=Toolbox)
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic

    async def __call__(self, source: AsyncIterator[Conversation]) -> AsyncGenerator[ConversedFrame, None]:
        """Raise what makes the first prompt impossible, unless something had to be told ahead of it."""
        async for conversation in source:
            exchange = Exchange(conversation, self.toolbox, self.limits, self.clock)
            append = exchange.transcript.texts.append
            try:
                async with aclosing(exchange.begin()) as frames:
                    async for frame in frames:
                        yield exchange.noted(frame)
                while (turn := exchange.next_turn()) is not None:
                    async with self._accepted(exchange) as (begun, parsed):
                        for passed in turn.feed(begun) if begun else ():
                            yield exchange.noted(passed)
                        async for frame in parsed:
                            if turn.is_plain and type(frame) is ItemDelta:  # nearly every frame
                                append(frame.text)
                                yield frame
                            else:
                                for passed in turn.feed(frame):
                                    yield exchange.noted(passed)
                    async with aclosing(exchange.run(turn)) as frames:
                        async for frame in frames:
                            yield exchange.noted(frame)
            finally:
                await exchange.close()

    @asynccontextmanager
    async def _accepted(
        self, exchange: Exchange
    ) -> AsyncGenerator[tuple[ParsedFrame | None, AsyncIterator[ParsedFrame]], None]:
        """The first frame of a turn, if there is any, and those behind it.

        A response that has begun can no longer be refused: it waits until the engine has room for its turn.
        """
        while True:
            async with self.inner.open(replay([exchange.conversation])) as parsed:
                try:
                    begun = await anext(parsed, None)
                except EngineOverloaded:
                    if not exchange.has_begun:
                        raise
                else:
                    yield begun, parsed
                    return
            await asyncio.sleep(self.limits.retry_seconds)
