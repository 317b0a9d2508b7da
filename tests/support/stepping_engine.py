"""An engine that writes a token for each of its generations at each step, and goes on where a prompt ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from penstock.pipeline.frames import (
    EngineFrame,
    FinishReason,
    GenerationFinished,
    Prompt,
    TokenChunk,
    TokenIds,
)
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.services.engines.engine import sampling_parameters
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.services.engines.weights import spans


@dataclass
class SteppingEngine(ScriptedEngine):
    """Write the tokens of the script; a prompt that has the first ones at its end gets the rest of them."""

    places: int = 4
    most_prompts: int | None = None
    schedules_by_priority: bool = False
    first: dict[str, TokenIds] = field(default_factory=dict)
    """The first prompt of each response."""
    parts: list[Prompt] = field(default_factory=list)
    """The prompts that went on."""
    most_running: int = 0
    cached: int = 3
    version: str = "one"
    """The version of the weights."""
    steps: int = 0
    _stepped: asyncio.Event = field(default_factory=asyncio.Event)

    def step(self) -> None:
        """Let each generation write its next token."""
        self.steps += 1
        stepped, self._stepped = self._stepped, asyncio.Event()
        stepped.set()

    async def cancel(self, response_id: str) -> bool:
        found = await super().cancel(response_id)
        self._stepped.set()  # those that go on wait again
        self._stepped = asyncio.Event()
        return found

    async def _frames(self, script: Script, prompt: Prompt, run: Any) -> AsyncGenerator[EngineFrame, None]:
        self.most_running = max(self.most_running, self.running)
        first = self.first.setdefault(prompt.facts.response_id, prompt.token_ids)
        written = prompt.token_ids[len(first) :]
        assert prompt.token_ids == (*first, *script.token_ids[: len(written)])
        if written:
            self.parts.append(prompt)
        limit = prompt.facts.sampling.max_tokens
        ends = sampling_parameters(prompt)["stop_token_ids"]
        for count, token in enumerate(script.token_ids[len(written) :], 1):
            seen = self.steps
            while self.steps == seen and not run.is_cancelled:
                await self._stepped.wait()
            if run.is_cancelled:
                yield GenerationFinished("cancelled", self.cached, duration=1.0, weights=self._weights(count - 1))
                return
            yield TokenChunk((token,), cached_tokens=self.cached if count == 1 else 0)
            run.is_finished = token in ends or count == limit
            if run.is_finished:
                reason: FinishReason = "stop" if token in ends else "length"
                yield GenerationFinished(reason, self.cached, duration=1.0, weights=self._weights(count))
                return

    def _weights(self, tokens: int) -> tuple[WeightSpan, ...]:
        return spans([WeightSpan(self.version, 0, tokens)], tokens)
