"""Shadow: a second engine reads a share of the turns again, after the client has got them."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from penstock.pipeline.frames import GenerationFinished, GenerationStarted, Prompt, TokenChunk, TokenFrame
from penstock.services.forced.turn import Turn


@dataclass(frozen=True)
class Shadowed:
    """The stage ``generate``, which hands a ``share`` of its turns over to ``take`` when they have ended.

    The others pass as before, at no cost.
    """

    generate: Callable[[AsyncIterator[Prompt]], AsyncGenerator[TokenFrame, None]]
    take: Callable[[Turn], None]
    share: float

    def __call__(self, source: AsyncIterator[Prompt]) -> AsyncGenerator[TokenFrame, None]:
        """Return the tokens of each prompt."""
        is_chosen = random.random() < self.share  # noqa: S311 - it protects nothing
        return self._watched(source) if is_chosen else self.generate(source)

    async def _watched(self, source: AsyncIterator[Prompt]) -> AsyncGenerator[TokenFrame, None]:
        prompts: list[Prompt] = []
        started: GenerationStarted | None = None
        chunks: list[TokenChunk] = []
        async with aclosing(_kept(source, prompts)) as kept, aclosing(self.generate(kept)) as frames:
            async for frame in frames:
                match frame:
                    case GenerationStarted():
                        started, chunks = frame, []
                    case TokenChunk():
                        chunks.append(frame)
                    case GenerationFinished():
                        assert started
                        self.take(_turn(prompts.pop(), started, chunks, frame))
                yield frame


async def _kept(source: AsyncIterator[Prompt], prompts: list[Prompt]) -> AsyncGenerator[Prompt, None]:
    async for prompt in source:
        prompts.append(prompt)
        yield prompt


def _turn(prompt: Prompt, started: GenerationStarted, chunks: list[TokenChunk], finished: GenerationFinished) -> Turn:
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    logprobs = tuple(each for chunk in chunks for each in chunk.logprobs)
    return Turn(
        1,
        prompt=prompt,
        started=started,
        tokens=tokens,
        logprobs=logprobs if len(logprobs) == len(tokens) else (),
        finished=finished,
    )
