"""Several streams read as one: order, errors, and the end of all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.http.woven import AHEAD, woven


async def counted(values: int, closed: list[int], fails_at: int | None = None) -> AsyncGenerator[int, None]:
    try:
        for value in range(values):
            if value == fails_at:
                raise LookupError(value)
            if value % 3 == values % 3:
                await asyncio.sleep(0)
            yield value
    finally:
        closed.append(values)


@given(st.lists(st.integers(0, 3 * AHEAD), min_size=1, max_size=5))
def test_each_stream_comes_whole_and_in_order(lengths: list[int]) -> None:
    async def read() -> list[tuple[int, int]]:
        async with woven([partial(counted, length, []) for length in lengths]) as values:
            return [value async for value in values]

    values = asyncio.run(read())
    began = [position for position, length in enumerate(lengths) if length]
    assert [position for position, _ in values[: len(began)]] == began
    for position, length in enumerate(lengths):
        assert [value for at, value in values if at == position] == [*range(length)]


@pytest.mark.parametrize("fails_at", [0, 1, 5, 40])
async def test_an_error_ends_all(fails_at: int) -> None:
    closed: list[int] = []
    strands = [partial(counted, 10**9, closed), partial(counted, 50, closed, fails_at)]
    with pytest.raises(LookupError):
        async with woven(strands) as values:
            async for _ in values:
                pass
    assert sorted(closed) == [50, 10**9]


async def test_a_stream_that_waits_for_the_end_of_another_may_be_the_last_to_begin() -> None:
    place = asyncio.Semaphore(1)

    async def in_turn(count: int) -> AsyncGenerator[int, None]:
        async with place:
            for value in range(count):
                await asyncio.sleep(0)
                yield value

    async with woven([partial(in_turn, 3 * AHEAD), partial(in_turn, 2 * AHEAD)]) as values:
        read = [value async for value in values]
    assert [value for at, value in read if at == 0] == [*range(3 * AHEAD)]
    assert [value for at, value in read if at == 1] == [*range(2 * AHEAD)]


async def test_a_reader_that_leaves_ends_all() -> None:
    closed: list[int] = []
    async with woven([partial(counted, 10**9, closed) for _ in range(3)]) as values:
        await anext(values)
    assert closed == [10**9] * 3
