"""vLLM in this process: `AsyncLLM`, with token ids in and out.

vLLM's interface moves between releases, and importing it takes seconds and gigabytes: this file alone knows it, inside
functions.  Written against vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.errors import EngineDead, EngineFailed, EngineOverloaded, InvalidPrompt
from pipeline.frames import EngineFrame, GenerationFinished, Prompt, TokenChunk

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector


class UnknownModel(ValueError):
    """A model that this server cannot talk to."""


@dataclass(frozen=True)
class VllmEngine:
    """An engine whose workers live in child processes of this one."""

    _llm: AsyncLLM
    model: str
    """The name under which vLLM serves the model."""
    context_length: int
    vocabulary_size: int

    _running: set[RequestOutputCollector] = field(default_factory=set)

    @property
    def is_alive(self) -> bool:
        """False once a worker has died."""
        return not self._llm.errored

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        """Add the request to vLLM's queue; abort it on the way out unless it is finished."""
        reading = _Reading(time.monotonic())
        collector = await self._add(prompt)
        self._running.add(collector)
        try:
            async with aclosing(reading.frames(collector)) as frames:
                yield frames
        finally:
            self._running.discard(collector)
            if not reading.finished and self.is_alive:
                await self._llm.abort(collector.request_id, internal=True)

    async def stop(self) -> None:
        """Tell every generation that runs to end."""
        for collector in self._running:
            collector.put(EngineFailed("The server is stopping."))

    async def close(self) -> None:
        """End the worker processes."""
        self._llm.shutdown()

    async def _add(self, prompt: Prompt) -> RequestOutputCollector:
        with _refusals():
            params = _sampling_params(prompt)
            try:
                return await self._llm.add_request(
                    prompt.response.id, {"prompt_token_ids": list(prompt.token_ids)}, params
                )
            except asyncio.CancelledError:  # vLLM may have begun with it already
                await self._llm.abort(prompt.response.id)
                raise


@dataclass
class _Reading:
    started: float
    finished: bool = False

    async def frames(self, collector: RequestOutputCollector) -> AsyncGenerator[EngineFrame, None]:
        """Pass on every token of every output: vLLM merges the outputs that a slow reader has not taken yet."""
        cached_tokens = 0
        with _faults():
            while True:
                output: Any = collector.get_nowait() or await collector.get()
                self.finished = output.finished
                cached_tokens = output.num_cached_tokens or cached_tokens
                completion = output.outputs[0]
                if completion.token_ids:
                    yield TokenChunk(tuple(completion.token_ids))
                if self.finished:
                    break
        if completion.finish_reason not in ("stop", "length"):
            raise EngineFailed(f"The engine gave up on this response ({completion.finish_reason}).")
        yield GenerationFinished(completion.finish_reason, cached_tokens, time.monotonic() - self.started)


def _sampling_params(prompt: Prompt) -> SamplingParams:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=prompt.sampling.temperature,
        top_p=prompt.sampling.top_p,
        max_tokens=prompt.sampling.max_tokens,
        stop_token_ids=list(prompt.stop_token_ids),
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
        skip_special_tokens=False,
    )


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what vLLM says to a request that it does not take into our errors."""
    from vllm.exceptions import GracefulHTTPError, VLLMClientError

    try:
        with _faults():
            yield
    except GracefulHTTPError as error:
        raise EngineOverloaded("The engine's queue is full. Try again in a moment.") from error
    except (VLLMClientError, ValueError) as error:
        raise InvalidPrompt(str(error)) from error


@contextmanager
def _faults() -> Iterator[None]:
    """Turn the faults of a running engine into our errors."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDead("The engine has died.") from error
    except EngineGenerateError as error:
        raise EngineFailed("The engine failed at this response.") from error


def start_vllm(model: str, arguments: Sequence[str]) -> VllmEngine:
    """Start vLLM for ``model`` with ``arguments`` as its own command line takes them; call it in the event loop.

    Takes from ten seconds to minutes.  Exits with vLLM's own message for arguments that it does not know, and raises
    `UnknownModel` for a model that does not speak Harmony, before its weights are loaded.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="penstock serve"))
    namespace: Any = parser.parse_args(["--model", model, *arguments])
    engine_args = AsyncEngineArgs.from_cli_args(namespace)
    config = engine_args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    if (kind := config.model_config.hf_config.model_type) != "gpt_oss":
        raise UnknownModel(f"{model} is a {kind} model: penstock serves models that speak Harmony (gpt_oss).")
    llm = AsyncLLM.from_vllm_config(config, disable_log_stats=engine_args.disable_log_stats)
    served = engine_args.served_model_name
    name = served[0] if isinstance(served, list) else served or model
    return VllmEngine(llm, name, llm.model_config.max_model_len, llm.model_config.get_vocab_size())
