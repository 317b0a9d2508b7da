"""Generate: turn a prompt into tokens."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.errors import ContextTooLong, EngineFailed, EngineOverloaded, InvalidPrompt
from penstock.pipeline.frames import (
    EngineFrame,
    GenerationFinished,
    GenerationStarted,
    Origin,
    Prompt,
    TokenFrame,
    TokenIds,
    with_facts,
)
from penstock.pipeline.hot_path import at_the_engine
from penstock.pipeline.tasks import apart
from penstock.services.engines.engine import LONG_TOKENS, Engine, ScoresPrompts, ScoresTokens


def _never(response_id: str) -> bool:
    return False


def _none(response_id: str, origin: Origin) -> bool:
    return False


@at_the_engine
@dataclass(frozen=True)
class Generate:
    """Let ``engine`` continue each prompt.  Closing the stream aborts the generation.

    ``is_accepted`` tells if a response, given by its id, can no longer be refused.  If the engine has no room for a
    prompt of such a response, the prompt waits, and the engine gets it again after ``retry_seconds``.  The engine
    also reports log probabilities for the responses that ``is_scored`` names: the frames have them, and the parsers
    read them only if the request asks for them.
    """

    engine: Engine
    is_accepted: Callable[[str], bool] = _never
    retry_seconds: float = 1.0
    is_scored: Callable[[str, Origin], bool] = _none

    async def __call__(self, source: AsyncIterator[Prompt]) -> AsyncGenerator[TokenFrame, None]:
        """Yield the tokens of each prompt; the first frame means that the engine has accepted the prompt.

        Raises `ContextTooLong` or `InvalidPrompt` before the first frame for a prompt that cannot be run,
        `EngineOverloaded` for one that can be refused, and `EngineFailed` if the engine's stream ends early.
        """
        async for prompt in source:
            async with _Accepted(self, await self.checked(prompt)) as frames:
                raw, wanted = prompt.facts.raw, prompt.facts.wants_token_ids
                is_read = wanted or (prompt.chat is not None if raw is None else raw.echoes)
                yield GenerationStarted(
                    facts=prompt.facts,
                    prompt_tokens=len(prompt.token_ids),
                    raw_messages=prompt.raw_messages,
                    held_to_grammar=prompt.grammar is not None,
                    chat=prompt.chat,
                    prompt=prompt.token_ids if is_read else (),
                    channel=prompt.channel,
                )
                del prompt  # free it: it may be long, and the generation may take long
                frame: EngineFrame | None = None
                async for frame in frames:
                    yield frame
                if not isinstance(frame, GenerationFinished):
                    raise EngineFailed("The engine's stream ended early.")

    async def checked(self, prompt: Prompt) -> Prompt:
        """Return the prompt with ``max_tokens`` set to what fits into the context window.

        Token ids are checked here because one id outside the vocabulary would crash vLLM, and with it every request.
        """
        room = self.engine.context_length - len(prompt.token_ids)
        if room <= 0:
            raise ContextTooLong(len(prompt.token_ids), self.engine.context_length)
        if not prompt.token_ids:
            raise InvalidPrompt("The prompt is empty.")
        is_long = len(prompt.token_ids) > LONG_TOKENS
        if not await apart(is_long, _are_within, prompt.token_ids, self.engine.vocabulary_size):
            raise InvalidPrompt("The prompt has token ids that the model does not know.", param="input")
        limit = min(room, prompt.facts.sampling.max_tokens or room)
        if prompt.grammar is not None and prompt.facts.sampling.ignore_eos is True:
            raise InvalidPrompt(
                "What constrains the output also ends it, so its end cannot be ignored.", param="ignore_eos"
            )
        if prompt.facts.sampling.prompt_logprobs is not UNSET and not isinstance(self.engine, ScoresPrompts):
            raise InvalidPrompt("The engine of this server reports no log probabilities of prompts.", param="echo")
        if prompt.facts.sampling.logprob_token_ids is not UNSET and not isinstance(self.engine, ScoresTokens):
            raise InvalidPrompt(
                "The engine of this server reports no log probabilities of chosen tokens.", param="logprob_token_ids"
            )
        return with_facts(prompt, sampling=replace(prompt.facts.sampling, max_tokens=limit, logprobs=self._top(prompt)))

    def _top(self, prompt: Prompt) -> int | None:
        """Return the number of alternatives to report: none beside the token itself if only a recording wants them."""
        facts = prompt.facts
        is_extra = facts.sampling.logprobs is None and self.is_scored(facts.response_id, facts.origin)
        return 0 if is_extra else facts.sampling.logprobs


class _Accepted:
    """The generation of a prompt, for the length of a block, which begins when the engine accepts the prompt."""

    __slots__ = ("_generate", "_opened", "_prompt")

    def __init__(self, generate: Generate, prompt: Prompt) -> None:
        self._generate = generate
        self._prompt: Prompt | None = prompt

    async def __aenter__(self) -> AsyncIterator[EngineFrame]:
        generate, prompt, self._prompt = self._generate, self._prompt, None  # it may be long
        assert prompt is not None
        while True:
            try:
                self._opened = generate.engine.open(prompt)
                return await self._opened.__aenter__()
            except EngineOverloaded:
                if not generate.is_accepted(prompt.facts.response_id):
                    raise
            await asyncio.sleep(generate.retry_seconds)  # its client has a status already: it can no longer be refused

    async def __aexit__(self, *raised: Any) -> bool | None:
        return await self._opened.__aexit__(*raised)


def _are_within(token_ids: TokenIds, size: int) -> bool:
    """Check the token ids, many at a time, between which other threads compute."""
    for start in range(0, len(token_ids), LONG_TOKENS):
        try:
            some = array("Q", token_ids[start : start + LONG_TOKENS])
        except (OverflowError, TypeError):  # negative, of more than 64 bits, or no integer
            return False
        if _largest(some) >= size:
            return False
    return True


def _largest(token_ids: array[int]) -> int:
    """Return the largest id, by numpy if an engine has loaded it: `max` takes six times as long."""
    numpy = sys.modules.get("numpy")
    return max(token_ids) if numpy is None else int(numpy.frombuffer(token_ids, numpy.uint64).max())
