"""An engine that replays recorded tokens from a fixture file."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from penstock.pipeline.errors import InvalidPrompt
from penstock.pipeline.frames import EngineFrame, GenerationFinished, GenerationStarted, Prompt, TokenFrame
from penstock.pipeline.recordings.format import read_frames
from penstock.stages.models.harmony.vocabulary import VOCABULARY_SIZE


@dataclass(frozen=True)
class TokenReplayEngine:
    """Answer the prompts of each response with the token frames recorded in the file ``path``, turn by turn."""

    path: Path
    context_length: int = 131_072
    vocabulary_size: int = VOCABULARY_SIZE
    models: tuple[str, ...] = ("recorded",)
    scores_prompts: Literal[True] = True
    scores_tokens: Literal[True] = True
    _running: set[str] = field(default_factory=set)
    """Ids of the running responses."""
    _turns: dict[str, int] = field(default_factory=dict)
    """Number of turns replayed so far, by response id."""

    @property
    def is_alive(self) -> bool:
        return self.path.is_file()

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        """Replay the next turn; raise `InvalidPrompt` if there is no recording, or no further turn in it."""
        response_id = prompt.facts.response_id
        recorded = self._next_turn(response_id)
        self._running.add(response_id)
        try:
            async with aclosing(self._frames(response_id, recorded)) as frames:
                yield frames
        finally:
            self._running.discard(response_id)

    def _next_turn(self, response_id: str) -> list[EngineFrame]:
        if not self.is_alive:
            raise InvalidPrompt(f"There is no recording at {self.path}.")
        recorded, turn = self._recorded(), self._turns.get(response_id, 0)
        if turn >= len(recorded):
            raise InvalidPrompt(f"There is no turn {turn + 1} in the recording at {self.path}.")
        self._turns[response_id] = turn + 1
        return recorded[turn]

    def _recorded(self) -> list[list[EngineFrame]]:
        turns: list[list[EngineFrame]] = [[]]
        for frame in read_frames(self.path, TokenFrame):
            if isinstance(frame, GenerationStarted):
                continue
            if turns[-1] and isinstance(turns[-1][-1], GenerationFinished):
                turns.append([])
            turns[-1].append(frame)
        return turns

    async def _frames(self, response_id: str, recorded: list[EngineFrame]) -> AsyncGenerator[EngineFrame, None]:
        for frame in recorded:
            if response_id not in self._running:
                yield GenerationFinished("cancelled", cached_tokens=0, duration=0.0)
                return
            yield frame

    async def cancel(self, response_id: str) -> bool:
        is_running = response_id in self._running
        self._running.discard(response_id)
        return is_running

    async def stop(self) -> None:
        """Do nothing: a recording ends by itself."""

    async def close(self) -> None:
        """Do nothing: no resources are held."""
