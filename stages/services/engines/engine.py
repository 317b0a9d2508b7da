"""The engine interface of the ``generate`` stage: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from msgspec import UNSET

from penstock.pipeline.frames import EngineFrame, Prompt, Sampling

PARAMETERS = {
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
    "input_tokens": "input",
    "extra_args": "vllm_xargs",
}
"""vLLM's parameters with a different name in the API, used in error messages."""

_OPTIONAL = ("min_tokens", "bad_words", "logit_bias", "allowed_token_ids", "watermarking", "extra_args")


def stop_token_ids(prompt: Prompt) -> list[int]:
    """Return the tokens at which generation stops: those that end a turn, and those of the request."""
    return [*prompt.stop_token_ids, *(prompt.facts.sampling.stop_token_ids or ())]


def optional_parameters(sampling: Sampling) -> dict[str, Any]:
    """Return the sampling parameters that only some requests have, by the names of vLLM's ``SamplingParams``."""
    given = {name: value for name in _OPTIONAL if (value := getattr(sampling, name)) is not UNSET}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


class Engine(Protocol):
    """An inference engine: it generates tokens for prompts."""

    @property
    def models(self) -> tuple[str, ...]:
        """Model names that a request may use: the model's own name, then its aliases and LoRA adapters."""
        ...

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and answer together."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Upper bound (exclusive) of the token ids in a prompt.  A higher id may crash the engine."""
        ...

    @property
    def is_alive(self) -> bool:
        """True if the engine can serve requests."""
        ...

    def open(self, prompt: Prompt) -> AbstractAsyncContextManager[AsyncIterator[EngineFrame]]:
        """Return a context manager that runs one generation.

        Entering it returns once the engine has accepted the prompt, or raises `InvalidPrompt`, `EngineOverloaded`,
        `ServerStopping` or `EngineDead`.  Its frames are ``TokenChunk* . GenerationFinished``; `EngineFailed` and
        `EngineDead` may be raised between them.  Leaving the block early aborts the generation.
        """
        ...

    async def cancel(self, response_id: str) -> bool:
        """End the generation for a response at once; return True if there was one.

        Its frames end with the reason ``cancelled``, after all tokens generated so far.
        """
        ...

    async def stop(self) -> None:
        """End all running generations with `EngineFailed`, and accept no more prompts.

        Later prompts, and those being accepted at this moment, are refused with `ServerStopping`.
        """
        ...

    async def close(self) -> None:
        """Release the engine's resources."""
        ...
