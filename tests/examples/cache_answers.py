"""Answer repeated prompts from memory, without the engine.

Only answers of temperature 0 are kept. The key holds all that the engine reads, and the owner of the request, so that
the speed of an answer tells no client what another one has sent. Each turn of the model is kept by itself: tools run
again. A stage that wraps another one finds it in the pipeline, and closes what it opened.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from cachetools import LRUCache

from penstock.pipeline.core import Pipeline, Stage, source_of
from penstock.pipeline.frames import GenerationFinished, GenerationStarted, Prompt, TokenFrame, replace


def key_of(prompt: Prompt) -> bytes:
    read = (prompt.token_ids, prompt.stop_token_ids, prompt.grammar, prompt.images, prompt.facts.sampling)
    return msgspec.msgpack.encode((read, prompt.facts.model, prompt.facts.origin.owner))


@dataclass(frozen=True)
class CacheAnswers:
    generate: Stage[Prompt, TokenFrame]
    known: LRUCache[bytes, list[TokenFrame]] = field(default_factory=lambda: LRUCache(1000))

    async def __call__(self, source: AsyncIterator[Prompt]) -> AsyncGenerator[TokenFrame, None]:
        async for prompt in source:
            key, answer = key_of(prompt), list[TokenFrame]()
            tokens = source_of(self.known[key]) if key in self.known else self.generate(source_of([prompt]))
            async with aclosing(tokens) as sequence:
                async for frame in sequence:
                    answer.append(frame)
                    started = isinstance(frame, GenerationStarted)  # it carries the request, whose id is new
                    yield replace(frame, facts=prompt.facts, raw_messages=prompt.raw_messages) if started else frame
            match answer:
                case [*_, GenerationFinished("stop" | "length")] if prompt.facts.sampling.temperature == 0:
                    self.known[key] = answer
                case _:
                    pass


def install(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline.replace("generate", CacheAnswers(pipeline.stage("generate")))
