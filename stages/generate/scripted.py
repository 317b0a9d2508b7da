"""An engine that follows a script: for tests and fault drills, beneath everything of ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice

from pipeline.errors import EngineDead, EngineFailed, ServerStopping, StageError
from pipeline.frames import EngineFrame, FinishReason, GenerationFinished, Prompt, TokenChunk, TokenLogprob
from stages.harmony import VOCABULARY_SIZE


@dataclass(frozen=True)
class Script:
    """What an engine does with a prompt."""

    token_ids: Sequence[int] = ()
    chunk_size: int = 1
    latency: float = 0.0
    """Seconds before each chunk."""
    reason: FinishReason = "stop"
    refusal: StageError | None = None
    """Raised in place of accepting the prompt."""
    error: Exception | None = None
    """Raised once all tokens are out."""
    dies: bool = False
    """Whether ``error`` takes the engine down with it."""
    endless: bool = False
    """Whether the tokens come round and round until the consumer leaves."""
    logprobs: Sequence[TokenLogprob] = ()
    """One for each token; they are told only where the prompt asks for some."""


@dataclass
class ScriptedEngine:
    """Play ``script`` for every prompt, and count what happens."""

    script: Script = field(default_factory=Script)
    context_length: int = 131_072
    vocabulary_size: int = VOCABULARY_SIZE
    models: tuple[str, ...] = ("tiny",)
    is_alive: bool = True
    is_stopping: bool = False
    running: int = 0
    aborted: int = 0
    prompts: list[Prompt] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        """Play the script once."""
        if not self.is_alive:
            raise EngineDead("The engine has died.")
        if self.is_stopping:
            raise ServerStopping
        if self.script.refusal:
            raise self.script.refusal
        self.prompts.append(prompt)
        self.running += 1
        progress = _Progress()
        try:
            async with aclosing(self._frames(prompt, progress)) as frames:
                yield frames
        finally:
            self.running -= 1
            self.aborted += not progress.finished

    async def stop(self) -> None:
        """Break off what runs, and refuse what comes."""
        self.is_stopping = True

    async def close(self) -> None:
        """The engine is gone."""
        self.is_alive = False

    async def _frames(self, prompt: Prompt, progress: _Progress) -> AsyncGenerator[EngineFrame, None]:
        script = self.script
        limit = prompt.sampling.max_tokens
        tokens = islice(cycle(script.token_ids) if script.endless else script.token_ids, limit)
        logprobs = None if prompt.sampling.logprobs is None else cycle(script.logprobs)
        generated = 0
        while chunk := tuple(islice(tokens, script.chunk_size)):
            await asyncio.sleep(script.latency)
            if self.is_stopping:
                raise EngineFailed("The server is stopping.")
            generated += len(chunk)
            yield TokenChunk(chunk, tuple(islice(logprobs, len(chunk))) if logprobs else ())
        progress.finished = True
        if script.error:
            self.is_alive = not script.dies
            raise script.error
        reason = "length" if generated == limit else script.reason
        yield GenerationFinished(reason, cached_tokens=0, duration=0.0)


@dataclass
class _Progress:
    finished: bool = False
