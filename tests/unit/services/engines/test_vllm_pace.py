"""Tokens of an engine in this process: none is held back, and those that are late anyway are sent together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.pipeline.frames import TokenChunk
from penstock.services.engines import vllm
from penstock.services.engines.workers import take_steps_whole
from penstock.stages.models.vllm_private import MOST_STEPS, PASSED_AT_ONCE, Unread, pass_tokens_on

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports warn
]

STREAMS = 300
"""More than twice the outputs that vLLM processes at once by itself."""

STEPS = 20

NAMES = tuple(map(str, range(STREAMS)))


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
        read = self.read[generation.response_id]
        with suppress(ValueError):
            async for frame in generation.frames():
                if isinstance(frame, TokenChunk):
                    read.append(frame.token_ids)

    async def settle(self) -> None:
        """Wait until every token of the steps so far has been read, however many turns of the loop that takes."""
        seen = None
        while seen != (seen := sum(map(len, self.read.values()))) or self._steps.qsize():
            for _ in range(10):
                await asyncio.sleep(0)


@asynccontextmanager
async def streams(at_once: int = 1, paths: Mapping[str, Any] | None = None) -> AsyncGenerator[Streams, None]:
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: PLC0415 - takes seconds
    from vllm.v1.engine import EngineCoreRequest  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector  # noqa: PLC0415

    take_steps_whole()
    steps, processor = asyncio.Queue[Any](), OutputProcessor(None, log_stats=False)
    unread = {name: Unread(at_once, (paths or {}).get(name)) for name in NAMES}
    found = Streams(steps, unread)
    pass_tokens_on(processor, unread, lambda: not steps.empty())
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


@dataclass
class Path:
    """The hot path of a stream, which takes the tokens below ``least`` only."""

    name: str
    taken: list[tuple[str, tuple[int, ...]]]
    least: int = STEPS

    def take(self, chunk: TokenChunk) -> bool:
        if any(token >= self.least for token in chunk.token_ids):
            return False
        self.taken.append((self.name, chunk.token_ids))
        return True


def paths(least: int = STEPS) -> tuple[dict[str, Path], list[tuple[str, tuple[int, ...]]]]:
    taken: list[tuple[str, tuple[int, ...]]] = []
    return {name: Path(name, taken, least) for name in NAMES}, taken


async def test_hot_paths_take_the_tokens_in_the_order_of_the_steps_and_wake_nobody() -> None:
    of_streams, taken = paths()
    async with streams(paths=of_streams) as found:
        for token in range(STEPS):
            found.step(token)
            await found.settle()
        assert {tuple(chunks) for chunks in found.read.values()} == {((0,),)}  # the first has facts for the reader
        assert taken == [(name, (token,)) for token in range(1, STEPS) for name in NAMES]
    assert {tuple(chunks) for chunks in found.read.values()} == {((0,), (STEPS,))}


async def test_what_a_hot_path_leaves_is_read_in_order() -> None:
    of_streams, taken = paths(least=7)
    async with streams(paths=of_streams) as found:
        for token in range(STEPS):
            found.step(token)
            await found.settle()
    assert {tuple(chunks) for chunks in found.read.values()} == {((0,), *((token,) for token in range(7, STEPS + 1)))}
    assert len(taken) == 6 * STREAMS


async def test_late_tokens_go_over_a_hot_path_together() -> None:
    of_streams, taken = paths()
    async with streams(paths=of_streams) as found:
        found.step(0)
        await found.settle()
        for token in range(1, STEPS):
            found.step(token)
        await found.settle()
        assert [tokens for name, tokens in taken if name == "0"] == [
            tuple(range(1, 1 + MOST_STEPS)),
            tuple(range(1 + MOST_STEPS, 1 + 2 * MOST_STEPS)),
            tuple(range(1 + 2 * MOST_STEPS, STEPS)),
        ]


async def test_one_turn_of_the_loop_passes_the_tokens_of_some_streams_on() -> None:
    of_streams, taken = paths()
    async with streams(paths=of_streams) as found:
        found.step(0)
        await found.settle()
        found.step(1)
        while not taken:
            await asyncio.sleep(0)
        assert len(taken) == PASSED_AT_ONCE < STREAMS
        await asyncio.sleep(0)
        assert [name for name, _ in taken] == [*NAMES]


async def test_reader_gets_the_error_of_its_hot_path_and_others_go_on() -> None:
    def broken(chunk: TokenChunk) -> bool:
        raise ValueError("broken")

    of_streams, taken = paths()
    vars(of_streams["7"])["take"] = broken
    async with streams(paths=of_streams) as found:
        for token in range(3):
            found.step(token)
            await found.settle()
    assert found.read.pop("7") == [(0,)]
    assert {tuple(chunks) for chunks in found.read.values()} == {((0,), (STEPS,))}
    assert len(taken) == 2 * (STREAMS - 1)
