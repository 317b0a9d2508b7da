"""Admit: hold prompts back while the engine is full, and let them pass in an order that is fair among API keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

from penstock.pipeline import metrics
from penstock.pipeline.errors import EngineOverloaded
from penstock.pipeline.frames import Prompt
from penstock.services.slots import Slots


@dataclass(frozen=True)
class Places:
    """The places of an engine: prompts that find no free slot wait for at most ``seconds``.

    A prompt is refused if ``most`` prompts wait or run, or if half of those that may wait are of one owner.  Clients
    without a key are one owner, who may have all.
    """

    slots: Slots
    most: int | None = None
    seconds: float | None = None

    def is_full(self, owner: str) -> bool:
        """Return True if no further prompt of an owner may wait."""
        if self.most is None:
            return False
        share = max(1, (self.most - self.slots.limit) // 2) if owner else self.most
        return self.slots.in_use + self.slots.waiting >= self.most or self.slots.waiting_of(owner) >= share


@dataclass(frozen=True)
class Admit:
    """Pass a prompt on when one of the engine's places is free, and hold the place until its generation is over.

    ``places_of`` gives the places of the engine that serves a model, or None if there are any number.  ``is_accepted``
    tells if a response, given by its id, can no longer be refused: its prompts wait without limits.  Others wait for at
    most ``patience`` seconds, given by their owner, or else as long as the places say.
    """

    places_of: Callable[[str], Places | None]
    is_accepted: Callable[[str], bool]
    patience: Callable[[str], float | None]

    async def __call__(self, source: AsyncIterator[Prompt]) -> AsyncGenerator[Prompt, None]:
        """Yield each prompt when it has a slot.  Raises `EngineOverloaded` for one that is refused."""
        async for prompt in source:
            owner, places = prompt.facts.origin.owner, self.places_of(prompt.facts.model)
            if places is not None:
                await self._enter(places, prompt, owner)
            passing = [prompt]
            del prompt  # it may be long, and the generation may take long
            try:
                yield passing.pop()
            finally:
                if places is not None:
                    places.slots.release(owner)

    async def _enter(self, places: Places, prompt: Prompt, owner: str) -> None:
        """Wait for a slot."""
        patience, started = None, time.monotonic()
        if not self.is_accepted(prompt.facts.response_id):
            if places.is_full(owner):
                raise EngineOverloaded("The engine is overloaded: its queue is full. Try again in a moment.")
            patience = self.patience(owner) or places.seconds
        if places.slots.acquire_now(owner):
            metrics.TURN_WAIT_SECONDS.observe(0.0)
            return
        try:
            with metrics.TURNS_WAITING.labels(prompt.facts.model).track_inprogress():
                async with asyncio.timeout(patience):
                    await places.slots.acquire(owner)
        except TimeoutError:
            raise EngineOverloaded(
                f"The engine is overloaded: it was full for {patience:g} seconds. Try again later."
            ) from None
        finally:
            metrics.TURN_WAIT_SECONDS.observe(time.monotonic() - started)
