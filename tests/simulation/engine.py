"""An engine that counts, as far and as fast as the metadata of a request say."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from penstock.pipeline.errors import EngineFailed, EngineOverloaded
from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.services.engines.scripted import Script, ScriptedEngine

REFUSALS = 3
"""Times that the engine is too full for a response, whose metadata say so."""


def count_to(last: int) -> str:
    """Return the text of an answer."""
    return " ".join(map(str, range(1, last + 1)))


@cache
def _tokens(last: int) -> tuple[int, ...]:
    markup = f"<|channel|>analysis<|message|>Count.<|end|><|start|>assistant<|channel|>final<|message|>{count_to(last)}"
    return tuple(load_encoding().encode_markup(f"{markup}<|return|>"))


@dataclass
class CountingEngine(ScriptedEngine):
    """Count to the number in the metadata of a request.

    The metadata have ``last``, the seconds of a token, and perhaps ``fault``: "refuse" for the first attempts, or
    "break" after the last token.
    """

    by_owner: Counter[str] = field(default_factory=Counter)
    """The generations that run, by owner."""
    refused: Counter[str] = field(default_factory=Counter)
    """The times that it was too full for a response."""
    when_begun: Callable[[str], None] = lambda _: None
    """Called with the owner of each generation that begins."""

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        if prompt.facts.response.metadata.get("fault") == "refuse":
            self.refused[prompt.facts.response_id] += 1
            if self.refused[prompt.facts.response_id] <= REFUSALS:
                raise EngineOverloaded("The engine is full.")
        owner = prompt.facts.origin.owner
        self.by_owner[owner] += 1
        self.when_begun(owner)
        try:
            async with super().open(prompt) as frames:
                yield frames
        finally:
            self.by_owner[owner] -= 1

    async def _frames(self, script: Script, prompt: Prompt, run: Any) -> AsyncGenerator[EngineFrame, None]:
        wanted = prompt.facts.response.metadata
        error = EngineFailed("The engine broke.") if wanted.get("fault") == "break" else None
        counting = Script(_tokens(int(wanted["last"])), latency=float(wanted["seconds"]), error=error)
        self.prompts.clear()
        await asyncio.sleep(float(wanted.get("wait", "0")))
        async with aclosing(super()._frames(counting, prompt, run)) as frames:
            async for frame in frames:
                yield frame
