"""Converse: the model and its tools take turns, until the model is done, the client's turn has come, or a limit.

The inner pipeline runs once per turn.  Calls that the server runs are run when a turn is over, all at the same time
where the request allows it; the frames of each say what really happens, when it happens.  What they returned extends
the conversation, which is then rendered again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from pipeline.core import Pipeline
from pipeline.frames import Conversation, ConversedFrame, ItemDelta, ParsedFrame
from pipeline.record import replay
from stages.converse.exchange import Exchange, Limits
from stages.converse.tools import Toolbox


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
                    async with self.inner.open(replay([exchange.conversation])) as parsed:
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
