"""Generate: a prompt becomes tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from penstock.pipeline.errors import ContextTooLong, EngineFailed, InvalidPrompt
from penstock.pipeline.frames import EngineFrame, GenerationFinished, GenerationStarted, Prompt, TokenFrame, TokenIds
from penstock.stages.services.engines.engine import Engine


@dataclass(frozen=True)
class Generate:
    """Let ``engine`` continue each prompt; leaving the stream aborts the generation."""

    engine: Engine

    async def __call__(self, source: AsyncIterator[Prompt]) -> AsyncGenerator[TokenFrame, None]:
        """Raise what makes a prompt impossible before the first frame, which says that the engine has accepted it."""
        async for prompt in source:
            async with self.engine.open(self._checked(prompt)) as frames:
                yield GenerationStarted(
                    response=prompt.response,
                    input=prompt.input,
                    prompt_tokens=len(prompt.token_ids),
                    tools=prompt.tools,
                    stop=prompt.sampling.stop,
                    raw_messages=prompt.raw_messages,
                    held_to_grammar=prompt.grammar is not None,
                    origin=prompt.origin,
                    chat=prompt.chat,
                    prompt=() if prompt.chat is None else prompt.token_ids,
                )
                del prompt  # it may be long, and so may the generation
                frame: EngineFrame | None = None
                async for frame in frames:
                    yield frame
                if not isinstance(frame, GenerationFinished):
                    raise EngineFailed("The engine's stream ended early.")

    def _checked(self, prompt: Prompt) -> Prompt:
        """The prompt with its token limit drawn; one id outside the vocabulary would kill vLLM for everybody."""
        room = self.engine.context_length - len(prompt.token_ids)
        if room <= 0:
            raise ContextTooLong(len(prompt.token_ids), self.engine.context_length)
        if not prompt.token_ids:
            raise InvalidPrompt("The prompt is empty.")
        if not _are_within(prompt.token_ids, self.engine.vocabulary_size):
            raise InvalidPrompt("The prompt has token ids that the model does not know.")
        limit = min(room, prompt.sampling.max_tokens or room)
        return msgspec.structs.replace(prompt, sampling=msgspec.structs.replace(prompt.sampling, max_tokens=limit))


def _are_within(token_ids: TokenIds, size: int) -> bool:
    """Whether they are ids of a vocabulary of that size, in half the time that min and max take for a long prompt."""
    token: Any = Annotated[int, msgspec.Meta(ge=0, lt=size)]
    try:
        msgspec.convert(token_ids, list[token])
    except msgspec.ValidationError:
        return False
    return True
