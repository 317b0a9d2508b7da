"""Tokens of an engine in this process: none is held back, and those that are late anyway are sent together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.pipeline.frames import TokenChunk
from penstock.services.engines import vllm
from penstock.services.engines.workers import take_steps_whole
from penstock.stages.models.vllm_private import Unread, pass_tokens_on

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports warn
]

STREAMS = 300
"""More than twice the outputs that vLLM processes at once by itself."""

STEPS = 20


class Streams:
    """Streams that read an `AsyncLLM` whose engine core does a step whenever the test says so."""

    def __init__(self, steps: asyncio.Queue[Any], unread: dict[str, Unread]) -> None:
        self._steps = steps
        self.read: dict[str, list[tuple[int, ...]]] = {name: [] for name in unread}
        """The token ids of each chunk, by stream."""

    def step(self, token: int, *, is_last: bool = False) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason  # noqa: PLC0415 - takes seconds

        end = FinishReason.STOP if is_last else None
        outputs = [EngineCoreOutput(name, [token], finish_reason=end) for name in self.read]
        self._steps.put_nowait(EngineCoreOutputs(outputs=outputs))

    async def follow(self, generation: Any) -> None:
        async for frame in generation.frames():
            if isinstance(frame, TokenChunk):
                self.read[generation.response_id].append(frame.token_ids)

    async def settle(self) -> None:
        """Wait until every token of the steps so far has been read, however many turns of the loop that takes."""
        seen = None
        while seen != (seen := sum(map(len, self.read.values()))) or self._steps.qsize():
            for _ in range(10):
                await asyncio.sleep(0)


@asynccontextmanager
async def streams(at_once: int = 1) -> AsyncGenerator[Streams, None]:
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: PLC0415 - takes seconds
    from vllm.v1.engine import EngineCoreRequest  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector  # noqa: PLC0415

    take_steps_whole()
    steps, processor = asyncio.Queue[Any](), OutputProcessor(None, log_stats=False)
    unread = {str(number): Unread(at_once) for number in range(STREAMS)}
    found = Streams(steps, unread)
    pass_tokens_on(processor, unread)
    llm = SimpleNamespace(
        engine_core=SimpleNamespace(get_output_async=steps.get),
        output_processor=processor,
        output_handler=None,
        log_stats=False,
        logger_manager=None,
        renderer=SimpleNamespace(mm_processor_cache=None),
    )
    async with asyncio.TaskGroup() as reading:
        for name, ids in unread.items():
            request = EngineCoreRequest(
                request_id=name,
                prompt_token_ids=[1],
                mm_features=None,
                sampling_params=SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False),
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                external_req_id=name,
            )
            collector = RequestOutputCollector(RequestOutputKind.DELTA, name)
            processor.add_request(request, None, queue=collector)
            generation = vllm._Generation(name, collector, 0.0, False, None, None, ids)  # noqa: SLF001
            reading.create_task(found.follow(generation))
        AsyncLLM._run_output_handler(cast("AsyncLLM", llm))  # noqa: SLF001
        handler: Any = llm.output_handler
        yield found
        found.step(STEPS, is_last=True)
    handler.cancel()


async def test_no_token_waits_for_the_next() -> None:
    async with streams() as found:
        for token in range(STEPS):
            found.step(token)
            await found.settle()
            assert {chunks[-1] for chunks in found.read.values()} == {(token,)}


async def test_tokens_that_are_late_are_sent_together() -> None:
    async with streams() as found:
        found.step(0)
        await found.settle()
        for token in range(1, STEPS):  # as if the loop had worked on something else for so long
            found.step(token)
        await found.settle()
        assert {tuple(chunks) for chunks in found.read.values()} == {((0,), tuple(range(1, STEPS)))}
    assert {sum(chunks, ()) for chunks in found.read.values()} == {tuple(range(STEPS + 1))}


async def test_tokens_of_a_line_wait_for_others_and_for_the_end() -> None:
    async with streams(at_once=8) as found:
        for token in range(STEPS):
            found.step(token)
            await found.settle()
        read = ((0,), tuple(range(1, 9)), tuple(range(9, 17)))
        assert {tuple(chunks) for chunks in found.read.values()} == {read}
    assert {tuple(chunks) for chunks in found.read.values()} == {(*read, tuple(range(17, STEPS + 1)))}
