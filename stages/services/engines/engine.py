"""The engine interface of the ``generate`` stage: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from penstock.pipeline.frames import EngineFrame, Prompt

PARAMETERS = {"logprobs": "top_logprobs", "max_tokens": "max_output_tokens", "input_tokens": "input"}
"""vLLM's parameters with a different name in the OpenAI API, used in error messages."""


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
