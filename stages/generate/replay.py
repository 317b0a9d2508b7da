"""An engine that says again what another one said: the recorded tokens of a fixture."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import InvalidPrompt
from pipeline.frames import EngineFrame, GenerationStarted, Prompt, TokenFrame
from pipeline.record import read_frames
from stages.harmony import VOCABULARY_SIZE


@dataclass(frozen=True)
class ReplayEngine:
    """Answer every prompt with the token frames recorded in the file ``path``."""

    path: Path
    context_length: int = 131_072
    vocabulary_size: int = VOCABULARY_SIZE
    models: tuple[str, ...] = ("recorded",)

    @property
    def is_alive(self) -> bool:
        """As alive as its file."""
        return self.path.is_file()

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        """Raise `InvalidPrompt` where there is no recording."""
        if not self.is_alive:
            raise InvalidPrompt(f"There is no recording at {self.path}.")
        async with aclosing(self._frames()) as frames:
            yield frames

    async def _frames(self) -> AsyncGenerator[EngineFrame, None]:
        for frame in read_frames(self.path, TokenFrame):
            if not isinstance(frame, GenerationStarted):
                yield frame

    async def stop(self) -> None:
        """A recording ends by itself."""

    async def close(self) -> None:
        """Nothing is held."""
