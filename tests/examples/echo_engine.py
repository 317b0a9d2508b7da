"""An engine that repeats the last message of the user, token by token: the least that an engine has to do.

penstock serve --engine echo_engine.py:engine --store none
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from time import monotonic

from penstock.api.settings import Settings
from penstock.pipeline.errors import EngineFailed, ServerStopping
from penstock.pipeline.frames import EngineFrame, FinishReason, GenerationFinished, Prompt, TokenChunk
from penstock.services.engines.engine import sampling_parameters
from penstock.stages.models.harmony.vocabulary import END, VOCABULARY_SIZE, load_encoding

encode = load_encoding().encode_markup
ASKED = tuple(encode("<|start|>user<|message|>"))
ANSWER, DONE = encode("<|channel|>final<|message|>"), encode("<|return|>")


def echo(prompt: Sequence[int]) -> list[int]:
    """Return an answer that repeats the last message of the user."""
    asked = [at for at in range(len(prompt)) if tuple(prompt[at : at + len(ASKED)]) == ASKED]
    message = prompt[asked[-1] + len(ASKED) :] if asked else prompt
    return [*ANSWER, *(message[: message.index(END)] if END in message else message), *DONE]


class EchoEngine:
    models = ("echo",)
    context_length = 131_072
    vocabulary_size = VOCABULARY_SIZE
    is_alive = True

    def __init__(self) -> None:
        self._running: set[str] = set()  # the ids of the responses
        self._is_stopping = False

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        if self._is_stopping:
            raise ServerStopping
        self._running.add(prompt.facts.response_id)
        try:
            async with aclosing(self._generate(prompt)) as frames:
                yield frames
        finally:
            self._running.discard(prompt.facts.response_id)

    async def _generate(self, prompt: Prompt) -> AsyncGenerator[EngineFrame, None]:
        began, response_id, parameters = monotonic(), prompt.facts.response_id, sampling_parameters(prompt)
        reason: FinishReason = "stop"
        for count, token in enumerate(echo(prompt.token_ids), start=1):
            await asyncio.sleep(0)
            if self._is_stopping:
                raise EngineFailed("The server is stopping.")
            if response_id not in self._running:
                reason = "cancelled"
                break
            yield TokenChunk((token,))
            if token in parameters["stop_token_ids"]:
                break
            if count == parameters["max_tokens"]:
                reason = "length"
                break
        self._running.discard(response_id)
        yield GenerationFinished(reason, cached_tokens=0, duration=monotonic() - began)

    async def cancel(self, response_id: str) -> bool:
        was_running = response_id in self._running
        self._running.discard(response_id)
        return was_running

    async def stop(self) -> None:
        self._is_stopping = True

    async def close(self) -> None:
        """Do nothing: the engine holds no resources."""


def engine(settings: Settings) -> EchoEngine:
    return EchoEngine()
