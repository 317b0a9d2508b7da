"""An engine that says as much as it is told to, and no more."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from math import inf
from typing import Any

from pipeline.errors import EngineFailed
from pipeline.frames import EngineFrame, GenerationFinished, Prompt, TokenChunk
from stages.generate.scripted import Script, ScriptedEngine


@dataclass
class Paced(ScriptedEngine):
    """Plays its script to those that run by so many tokens as `say` lets it."""

    is_free: bool = False
    """Whether it says everything by itself."""
    allowed: dict[str, int] = field(default_factory=dict)
    """How many tokens it may say, by the response's id."""

    def say(self, count: int) -> None:
        """Let everything that runs go on by so many tokens."""
        for run in self._runs:
            self.allowed[run.response_id] = self.allowed.get(run.response_id, 0) + count
            run.woken.set()

    def say_all(self) -> None:
        """Let everything come to its end, also what begins later."""
        self.is_free = True
        self.say(0)

    async def _frames(self, script: Script, prompt: Prompt, run: Any) -> AsyncGenerator[EngineFrame, None]:
        for number, token in enumerate(self.script.token_ids):
            while number >= self._limit(run) and not (run.is_cancelled or self.is_stopping):
                run.woken.clear()
                await run.woken.wait()
            if run.is_cancelled:
                yield GenerationFinished("cancelled", cached_tokens=0, duration=0.0)
                return
            if self.is_stopping:
                raise EngineFailed("The server is stopping.")
            yield TokenChunk((token,))
        run.is_finished = True
        yield GenerationFinished("stop", cached_tokens=0, duration=0.0)

    def _limit(self, run: Any) -> float:
        return inf if self.is_free else self.allowed.get(run.response_id, 0)
