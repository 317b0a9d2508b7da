"""What the ``generate`` stage asks of an engine: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from penstock.pipeline.frames import EngineFrame, Prompt

PARAMETERS = {"logprobs": "top_logprobs", "max_tokens": "max_output_tokens", "input_tokens": "input"}
"""Those of vLLM's parameters that the protocol calls otherwise."""


class Engine(Protocol):
    """Something that continues prompts."""

    @property
    def models(self) -> tuple[str, ...]:
        """The names that a request may ask for, that of the model itself first: its other names, and its adapters."""
        ...

    @property
    def context_length(self) -> int:
        """How many tokens prompt and answer may have together."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """One more than the highest token id that the engine survives."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once the engine can serve no request any more."""
        ...

    def open(self, prompt: Prompt) -> AbstractAsyncContextManager[AsyncIterator[EngineFrame]]:
        """Generate for the length of a block.

        Entering it is the engine's acceptance of the prompt: `InvalidPrompt`, `EngineOverloaded`, `ServerStopping` and
        `EngineDead` are raised here.  Its frames are ``TokenChunk* . GenerationFinished``; `EngineFailed` and
        `EngineDead` may be raised between them.  Leaving the block early aborts the generation.
        """
        ...

    async def cancel(self, response_id: str) -> bool:
        """End the generation for a response at once, read or not, and tell whether there was one.

        Its frames then end, behind all that was generated, with the reason ``cancelled``.
        """
        ...

    async def stop(self) -> None:
        """Tell every generation that runs to end with `EngineFailed`, and accept none from now on.

        A prompt that is still on its way, or being accepted at this moment, is refused with `ServerStopping`.
        """
        ...

    async def close(self) -> None:
        """Let go of what the engine holds."""
        ...
