from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.trace import Trace, traced

Numbers = AsyncIterator[int]


async def repeat(source: Numbers) -> AsyncGenerator[int, None]:
    """Yield each number ``n`` ``n`` times."""
    async for number in source:
        for _ in range(number):
            yield number


async def pair(source: Numbers) -> AsyncGenerator[tuple[int, int], None]:
    """Yield the numbers in pairs; a last number without a partner is paired with zero."""
    held = None
    async for number in source:
        if held is None:
            held = number
        else:
            yield held, number
            held = None
    if held is not None:
        yield held, 0


async def fail_at_three(source: Numbers) -> AsyncGenerator[int, None]:
    async for number in source:
        if number == 3:
            raise EngineFailed("three")
        yield number


def check_causes(trace: Trace) -> None:
    """Assert that every cause is an earlier junction's frame, and that causes never go backwards."""
    assert all(caused.cause is None for caused in trace.junctions[0].crossings)
    for ahead, crossed in pairwise(trace.junctions):
        causes = [caused.cause for caused in crossed.crossings]
        assert all(cause is not None and 0 <= cause < len(ahead.crossings) for cause in causes)
        assert causes == sorted(causes, key=lambda cause: -1 if cause is None else cause)


@given(st.lists(st.integers(0, 3)))
async def test_frame_is_caused_by_last_frame_its_stage_took(numbers: list[int]) -> None:
    pipeline = Pipeline.start("repeat", repeat).then("pair", pair)
    trace = await traced(pipeline, source_of(numbers), "numbers")
    check_causes(trace)
    assert trace.after("numbers").frames == numbers
    repeated = trace.after("repeat")
    assert [numbers[caused.cause] for caused in repeated.crossings if caused.cause is not None] == repeated.frames
    for caused in trace.after("pair").crossings:
        first, second = caused.frame
        assert repeated.frames[caused.cause or 0] == (second or first)


async def test_error_ends_the_trace() -> None:
    trace = await traced(Pipeline.start("fail", fail_at_three).then("repeat", repeat), source_of([1, 2, 3, 4]))
    assert isinstance(trace.error, EngineFailed)
    assert trace.after("source").frames == [1, 2, 3]
    assert trace.after("repeat").frames == [1, 2, 2]


async def test_junction_is_found_by_its_stage() -> None:
    trace = await traced(Pipeline.start("repeat", repeat), source_of([1]))
    with pytest.raises(LookupError, match="'pair'"):
        trace.after("pair")
