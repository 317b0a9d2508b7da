"""An engine whose log probabilities are known: a table of random numbers, which a seed and the prefix choose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path
from random import Random
from typing import Any, Literal

from msgspec import UNSET

from penstock.extensions.workbench.forced.turn import Turn
from penstock.pipeline.frames import (
    EngineFrame,
    GenerationFinished,
    GenerationStarted,
    Prompt,
    TokenChunk,
    TokenLogprob,
    replace,
)
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.pipeline.recordings.format import FORMAT, Header, write_frames
from penstock.stages.models.harmony.vocabulary import RETURN
from tests.support.fake_vllm import prompt_for_fakes

WORDS = tuple(range(1000, 1012))
"""The tokens that the model of the table writes; the last one is rarer than the mark that ends a turn."""

MODEL = "tiny"

ENGINES = """
from tests.support.table_engine import BlindEngine, LateEngine, SwappedEngine, TableEngine
from penstock.pipeline.errors import EngineFailed

def same(settings):
    return TableEngine(3)

def noisy(settings):
    return TableEngine(3, 0.4)

def broken(settings):
    return TableEngine(failure=EngineFailed("It broke."))

def swapped(settings):
    return SwappedEngine(3)

def raising(settings):
    return TableEngine(failure=ValueError("It broke."))

def late(settings):
    return LateEngine(3, 0.4)

def blind(settings):
    return BlindEngine(3)
"""
"""A file with engines for ``--engine``."""


@dataclass
class BlindEngine:
    """A model that is a table, and that does not say that it scores prompts.

    ``noise`` is by how much its logits may differ from those of the same ``seed``.
    """

    seed: int = 0
    noise: float = 0.0
    failure: Exception | None = None
    context_length: int = 8192
    vocabulary_size: int = 201_088
    models: tuple[str, ...] = (MODEL,)
    is_alive: bool = True
    weights: str = ""
    """The version of the weights; empty if it names none."""
    together: asyncio.Barrier | None = None
    """The prompts that wait for each other."""
    running: int = 0
    most_running: int = 0
    prompts: list[Prompt] = field(default_factory=list)

    def score(self, prefix: Sequence[int], token: int, top: int) -> TokenLogprob:
        logprobs = self.logprobs(prefix)
        ranked = sorted(logprobs.items(), key=lambda pair: -pair[1])
        rank = 1 + sum(value > logprobs.get(token, -50.0) for value in logprobs.values())
        return TokenLogprob(logprobs.get(token, -50.0), tuple(ranked[:top]), rank)

    def logprobs(self, prefix: Sequence[int]) -> dict[int, float]:
        own, other = Random(f"{self.seed} {tuple(prefix)}"), Random(f"noise {self.seed} {tuple(prefix)}")
        logits = {token: own.gauss() + self.noise * other.gauss() for token in (*WORDS, RETURN)}
        whole = log(sum(map(exp, logits.values())))
        return {token: logit - whole for token, logit in logits.items()}

    def greedy(self, prefix: Sequence[int], most: int) -> list[int]:
        """The likeliest tokens, up to the mark that ends the turn."""
        tokens: list[int] = []
        while len(tokens) < most and tokens[-1:] != [RETURN]:
            logprobs = self.logprobs((*prefix, *tokens))
            tokens.append(max(logprobs, key=lambda token: logprobs[token]))
        return tokens

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        self.prompts.append(prompt)
        if self.failure:
            raise self.failure
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async with aclosing(self._frames(prompt)) as frames:
                yield frames
        finally:
            self.running -= 1

    async def _frames(self, prompt: Prompt) -> AsyncGenerator[EngineFrame, None]:
        sampling, tokens = prompt.facts.sampling, prompt.token_ids
        if self.together:
            await self.together.wait()
        for _ in range(len(tokens) % 7):  # prompts end in another order than they come
            await asyncio.sleep(0)
        top = sampling.prompt_logprobs
        scores = () if top is UNSET else tuple(self.score(tokens[:at], tokens[at], top) for at in range(1, len(tokens)))
        generated = self.greedy(tokens, sampling.max_tokens or 50)
        yield TokenChunk(tuple(generated), prompt_logprobs=scores)
        named = (WeightSpan(self.weights, 0, len(generated)),) if self.weights else ()
        yield GenerationFinished(
            "stop" if generated[-1] == RETURN else "length", cached_tokens=0, duration=0.0, weights=named
        )

    async def cancel(self, response_id: str) -> bool:
        return False

    async def stop(self) -> None: ...

    async def close(self) -> None: ...


@dataclass
class TableEngine(BlindEngine):
    """The same model, which says that it scores prompts."""

    scores_prompts: Literal[True] = True


@dataclass
class SwappedEngine(TableEngine):
    """A model whose author took one argument of a log probability for another."""

    def score(self, prefix: Sequence[int], token: int, top: int) -> TokenLogprob:
        right = super().score(prefix, token, top)
        return TokenLogprob(right.top, right.logprob)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


@dataclass
class LateEngine(TableEngine):
    """A model that fails as soon as it is to write on."""

    async def _frames(self, prompt: Prompt) -> AsyncGenerator[EngineFrame, None]:
        if prompt.facts.sampling.prompt_logprobs is UNSET:
            raise ValueError("It broke.")
        async for frame in super()._frames(prompt):
            yield frame


def recorded_turn(
    prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = (), **sampling: Any
) -> Turn:
    """A turn as it was recorded; greedy unless ``sampling`` differs."""
    temperature, grammar = sampling.pop("temperature", 0.0), sampling.pop("grammar", None)
    asked = prompt_for_fakes(token_ids=tuple(prompt), model=MODEL, grammar=grammar, **sampling)
    facts = replace(asked.facts, sampling=replace(asked.facts.sampling, temperature=temperature))
    started = GenerationStarted(facts, len(prompt), held_to_grammar=grammar is not None)
    return Turn(1, replace(asked, facts=facts), started, tuple(tokens), tuple(logprobs))


def write_turns(folder: Path, *turns: Turn, header: Header | None = None) -> Path:
    """Write a recording of turns, as a server does."""
    folder.mkdir(parents=True, exist_ok=True)
    header = header or Header(FORMAT, MODEL)
    frames: list[Any] = []
    for turn in turns:
        chunks = [
            TokenChunk((token,), (turn.logprobs[at],) if turn.logprobs else ()) for at, token in enumerate(turn.tokens)
        ]
        frames += [turn.started, *chunks, GenerationFinished("stop", 0, 0.0)]
    write_frames(folder / "tokens.jsonl", frames, header)
    write_frames(folder / "prompt.jsonl", [turn.prompt for turn in turns], header)
    return folder
