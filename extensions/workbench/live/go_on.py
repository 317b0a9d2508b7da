"""Go on from the middle of an answer: the engine continues a turn after the tokens that it has already written."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.core import Stage, source_of
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import (
    GenerationFinished,
    GenerationStarted,
    Prompt,
    TokenChunk,
    TokenFrame,
    TokenIds,
    with_facts,
)
from penstock.services.engines.weights import moved


@dataclass
class GoOn:
    """The stage ``generate`` of one response whose first turn has begun elsewhere.

    The engine gets the tokens of that turn's prompt and those that were ``written`` after it.  The next stage gets the
    written ones first: so the parser comes to the place in the middle of an item at which the engine goes on.
    """

    generate: Stage[Prompt, TokenFrame]
    prompt: TokenIds
    written: TokenIds
    has_begun: bool = False

    async def __call__(self, source: AsyncIterator[Prompt]) -> AsyncGenerator[TokenFrame, None]:
        """Yield the tokens of each turn; raise `InvalidRequest` if the first one cannot go on."""
        async for prompt in source:
            goes_on = not self.has_begun
            given = self._lengthened(prompt) if goes_on else prompt
            async with aclosing(self.generate(source_of([given]))) as frames:
                async for frame in frames:
                    if goes_on and isinstance(frame, GenerationStarted):
                        self.has_begun = True
                        read = self.prompt if frame.prompt else ()
                        yield replace(frame, prompt_tokens=len(self.prompt), prompt=read)
                        for token in self.written:
                            yield TokenChunk((token,))
                    elif goes_on and isinstance(frame, GenerationFinished):
                        yield replace(frame, weights=moved(frame.weights, len(self.written)))
                    else:
                        yield frame

    def _lengthened(self, prompt: Prompt) -> Prompt:
        """Return the prompt with the tokens that the model has read and written, and what is left to write."""
        sampling = prompt.facts.sampling
        if prompt.grammar is not None:
            raise _refused("This answer is held to a grammar, which begins with its first token.")
        if sampling.logprobs is not None:
            raise _refused("The engine reports no log probabilities of tokens that are already written.")
        if not set(prompt.stop_token_ids).isdisjoint(self.written):
            raise _refused("The turn has ended among these tokens.")
        left = None if sampling.max_tokens is None else sampling.max_tokens - len(self.written)
        if left is not None and left <= 0:
            raise _refused("These are all tokens that max_output_tokens permits.")
        least = UNSET if sampling.min_tokens is UNSET else max(0, sampling.min_tokens - len(self.written))
        longer = replace(prompt, token_ids=(*self.prompt, *self.written))
        return with_facts(longer, sampling=replace(sampling, max_tokens=left, min_tokens=least))


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(f"The answer cannot go on from here. {message}", param="go_on.tokens")
