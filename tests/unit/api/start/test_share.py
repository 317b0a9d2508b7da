"""The share of a frontend: parts add up, and slots go to the frontends that need them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.start.share import LOOK, FrontendState, SharedSlots, part


@given(total=st.integers(0, 1000), count=st.integers(1, 16))
def test_parts_add_up_and_are_as_equal_as_possible(total: int, count: int) -> None:
    parts = [part(total, count, index) for index in range(count)]
    assert sum(parts) == total
    assert max(parts) - min(parts) <= 1


def shared(total: int, count: int) -> list[SharedSlots]:
    slots = [FrontendState() for _ in range(count)]
    return [SharedSlots(total, slots, index, lambda _: 1.0) for index in range(count)]


async def test_frontend_may_use_what_the_others_do_not_need() -> None:
    one, other = shared(6, 2)
    for _ in range(6):
        await one.acquire("a")
    waiting = asyncio.create_task(one.acquire("a"))
    await asyncio.sleep(0)
    assert not waiting.done()
    for _ in range(3):
        await asyncio.wait_for(other.acquire("b"), 120)  # its part is not taken away
    one.release("a")
    await asyncio.sleep(0)
    assert not waiting.done()  # nine are in use, of six
    waiting.cancel()


@pytest.mark.io
async def test_waiting_frontend_learns_of_slots_that_others_give_back() -> None:
    one, other = shared(4, 2)
    for _ in range(4):
        await one.acquire("a")
    for _ in range(2):
        await other.acquire("b")
    waiting = asyncio.create_task(other.acquire("b"))
    await asyncio.sleep(2 * LOOK)
    assert not waiting.done()
    for _ in range(3):
        one.release("a")
    await asyncio.wait_for(waiting, 120)


@given(
    total=st.integers(1, 12),
    count=st.integers(2, 4),
    steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["take", "give"])), max_size=60),
)
async def test_each_frontend_always_gets_its_part_and_the_engine_is_never_left_idle(
    total: int, count: int, steps: list[tuple[int, str]]
) -> None:
    every = shared(total, count)
    tasks: list[asyncio.Task[None]] = []
    for number, step in steps:
        slots = every[number % count]
        if step == "take":
            tasks.append(asyncio.create_task(slots.acquire("a")))
        elif slots.in_use:
            slots.release("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for index, each in enumerate(every):
            assert not each.waiting or each.in_use >= max(1, part(total, count, index))
    for each in every:  # as the next look does
        each.grant()
    if any(each.waiting for each in every):
        assert sum(each.in_use for each in every) >= total
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for each in every:
        if each._next_look:
            each._next_look.cancel()
