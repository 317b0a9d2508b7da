"""Shadowing: turns of this server pass through a second engine, which says for each token how likely it finds it.

It is the online form of ``penstock compare``.  No client waits for it: turns wait in a bounded queue after
they have ended, one at a time is read, and what does not fit is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

from penstock.pipeline import metrics
from penstock.pipeline.errors import StageError
from penstock.pipeline.foreign_errors import named_error
from penstock.services.engines.engine import Engine
from penstock.services.forced.scores import ForcedTurn, alternatives, forced, judged
from penstock.services.forced.turn import Turn

logger = logging.getLogger(__name__)

MOST_WAITING = 64
"""Turns that wait for the second engine."""

MOST_TOKENS = 2_000_000
"""Tokens of the turns that wait, prompts included."""

PAUSE = 30.0
"""Seconds until the second engine is tried again after it could not be used."""


@dataclass
class Shadow:
    """A second engine, which ``connect`` opens, and the turns that wait for it."""

    connect: Callable[[], Awaitable[Engine]]
    _waiting: deque[Turn] = field(default_factory=deque)
    _tokens: int = 0
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _numbers: count[int] = field(default_factory=count)
    _failed: bool = False

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Read turns for the length of a block; those that wait at its end are dropped."""
        reading = asyncio.create_task(self._keep_reading())
        try:
            yield
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading

    def take(self, turn: Turn) -> None:
        """Have a turn read, unless too many wait."""
        size = _size(turn)
        if not turn.tokens:
            return
        if len(self._waiting) >= MOST_WAITING or self._tokens + size > MOST_TOKENS:
            metrics.SHADOW_TURNS.labels("dropped").inc()
            return
        self._waiting.append(turn)
        self._tokens += size
        self._arrived.set()

    async def _keep_reading(self) -> None:
        while True:
            try:
                engine = await self.connect()
            except (OSError, StageError) as error:
                self._note(error)
                await asyncio.sleep(PAUSE)
                continue
            try:
                await self._read_all(engine)
            finally:
                await engine.close()

    async def _read_all(self, engine: Engine) -> None:
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            turn = self._waiting.popleft()
            self._tokens -= _size(turn)
            await self._read(engine, turn)

    async def _read(self, engine: Engine, turn: Turn) -> None:
        if _size(turn) >= engine.context_length:
            metrics.SHADOW_TURNS.labels("too_long").inc()
            return
        try:
            scores = await forced(engine, turn, f"resp_shadow{next(self._numbers)}", alternatives(turn))
        except StageError as error:
            metrics.SHADOW_TURNS.labels("failed").inc()
            self._note(error)
            return
        self._failed = False
        _report(judged(turn, scores, allowed=None, tie=0.0))

    def _note(self, error: Exception) -> None:
        """Log the first failure of several."""
        if not self._failed:
            logger.warning("The shadow cannot read an answer: %s", named_error(error))
        self._failed = True


def _size(turn: Turn) -> int:
    return len(turn.prompt.token_ids) + len(turn.tokens)


def _report(turn: ForcedTurn) -> None:
    """Count what the second engine finds of a turn."""
    verdicts = [token.has_changed for token in turn.tokens]
    for verdict, value in (("same", False), ("changed", True), ("uncounted", None)):
        if number := verdicts.count(value):
            metrics.SHADOW_TOKENS.labels(verdict).inc(number)
    metrics.SHADOW_NATS.observe(-sum(token.logprob for token in turn.tokens) / len(turn.tokens))
    changes = [(at, token) for at, token in enumerate(turn.tokens) if token.has_changed]
    if changes:
        worst = max(token.surprise for _, token in changes)
        logger.info(
            "The shadow would have changed %s first at token %d of %d, %d in all; the worst surprise is %.3f nats",
            *(turn.turn.prompt.facts.response_id, changes[0][0], len(turn.tokens), len(changes), worst),
        )
    outcome = "changed" if changes else "same" if False in verdicts else "uncounted"
    metrics.SHADOW_TURNS.labels(outcome).inc()
