"""An engine that follows a script: for tests and fault drills of the whole pipeline without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Literal

from msgspec import UNSET

from penstock.pipeline.errors import EngineDead, EngineFailed, ServerStopping, StageError
from penstock.pipeline.frames import (
    EngineFrame,
    FinishReason,
    GenerationFinished,
    Prompt,
    TokenChunk,
    TokenLogprob,
)
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.pipeline.tasks import wait_at_most
from penstock.services.engines.engine import sampling_parameters
from penstock.services.engines.weights import spans
from penstock.stages.models.harmony.vocabulary import VOCABULARY_SIZE


@dataclass(frozen=True)
class Script:
    """The engine's behaviour for a prompt."""

    token_ids: Sequence[int] = ()
    chunk_size: int = 1
    latency: float = 0.0
    """Seconds before each chunk."""
    reason: FinishReason = "stop"
    refusal: StageError | None = None
    """Raised instead of accepting the prompt."""
    error: Exception | Callable[[], Exception] | None = None
    """Raised after the last token; a function makes a new error each time, which the script does not hold."""
    dies: bool = False
    """True if the engine dies with ``error``."""
    endless: bool = False
    """True if the tokens are repeated until the consumer leaves."""
    stops: bool = False
    """True if the stop tokens of a prompt end its generation, as with a model; the script may go on after them."""
    logprobs: Sequence[TokenLogprob] = ()
    """Log probabilities, one for each token, of the prompt too; emitted only if the prompt requests them."""
    weights: Sequence[WeightSpan] = ()
    """The versions of the weights, by tokens of the script."""


@dataclass
class ScriptedEngine:
    """Play ``script`` for every prompt, and count what happens."""

    script: Script = field(default_factory=Script)
    context_length: int = 131_072
    vocabulary_size: int = VOCABULARY_SIZE
    models: tuple[str, ...] = ("tiny",)
    is_alive: bool = True
    is_stopping: bool = False
    aborted: int = 0
    prompts: list[Prompt] = field(default_factory=list)
    turns: Sequence[Script] = ()
    """Scripts for the first turns of each response, in place of ``script``."""
    scores_prompts: Literal[True] = True
    scores_tokens: Literal[True] = True
    _runs: list[_Run] = field(default_factory=list)

    @property
    def running(self) -> int:
        return len(self._runs)

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        if not self.is_alive:
            raise EngineDead("The engine has died.")
        if self.is_stopping:
            raise ServerStopping
        if self.script.refusal:
            raise self.script.refusal
        script = self._next_script(prompt.facts.response_id) if self.turns else self.script
        self.prompts.append(prompt)
        run = _Run(prompt.facts.response_id)
        self._runs.append(run)
        try:
            async with aclosing(self._frames(script, prompt, run)) as frames:
                yield frames
        finally:
            self._leave(run)

    async def cancel(self, response_id: str) -> bool:
        runs = [run for run in self._runs if run.response_id == response_id and not run.is_finished]
        for run in runs:
            run.is_cancelled = True
            run.woken.set()
            self._leave(run)
        return bool(runs)

    async def stop(self) -> None:
        self.is_stopping = True
        for run in self._runs:
            run.woken.set()

    async def close(self) -> None:
        self.is_alive = False

    def _next_script(self, response_id: str) -> Script:
        turn = sum(prompt.facts.response_id == response_id for prompt in self.prompts)
        return self.turns[turn] if turn < len(self.turns) else self.script

    def _leave(self, run: _Run) -> None:
        if run in self._runs:
            self._runs.remove(run)
            self.aborted += not run.is_finished

    async def _frames(self, script: Script, prompt: Prompt, run: _Run) -> AsyncGenerator[EngineFrame, None]:
        limit = prompt.facts.sampling.max_tokens
        tokens = islice(cycle(script.token_ids) if script.endless else script.token_ids, limit)
        logprobs = None if prompt.facts.sampling.logprobs is None else cycle(script.logprobs)
        stops = sampling_parameters(prompt)["stop_token_ids"] if script.stops else ()
        generated, stop, of_prompt = 0, None, _scores(script, prompt)
        while chunk := tuple(islice(tokens, script.chunk_size)):
            await run.sleep(script.latency)
            if run.is_cancelled:
                yield GenerationFinished("cancelled", 0, 0.0, weights=spans(script.weights, generated))
                return
            if self.is_stopping:
                raise EngineFailed("The server is stopping.")
            stop = next((at for at, token in enumerate(chunk, 1) if token in stops), None)
            chunk = chunk[:stop]
            generated += len(chunk)
            scores = tuple(islice(logprobs, len(chunk))) if logprobs else ()
            yield TokenChunk(chunk, scores, prompt_logprobs=of_prompt)
            of_prompt = ()
            if stop:
                break
        run.is_finished = True
        if script.error:
            self.is_alive = not script.dies
            raise script.error if isinstance(script.error, Exception) else script.error()
        reason = "length" if generated == limit and not stop else script.reason
        yield GenerationFinished(reason, 0, 0.0, weights=spans(script.weights, generated))


def _scores(script: Script, prompt: Prompt) -> tuple[TokenLogprob, ...]:
    """Return the log probabilities of a prompt, if it requests them."""
    if prompt.facts.sampling.prompt_logprobs is UNSET:
        return ()
    return tuple(islice(cycle(script.logprobs), len(prompt.token_ids) - 1))


@dataclass(eq=False)
class _Run:
    response_id: str
    is_finished: bool = False
    is_cancelled: bool = False
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    async def sleep(self, seconds: float) -> None:
        """Sleep, but wake early on `cancel` or `stop`."""
        if not seconds:
            await asyncio.sleep(0)
            return
        await wait_at_most(seconds, self.woken)
