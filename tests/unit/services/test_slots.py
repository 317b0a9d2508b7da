"""Slots: never too many, never one free while an owner that may have it waits, and fair by weight."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.frames import Origin
from penstock.services.slots import Slots


async def taken(slots: Slots, owner: str) -> asyncio.Task[None]:
    task = asyncio.create_task(slots.acquire(owner))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_one_key_gets_at_most_half_of_the_slots() -> None:
    slots = Slots(4, per_owner=2)
    greedy = [await taken(slots, "a") for _ in range(4)]
    assert [task.done() for task in greedy] == [True, True, False, False]
    assert (await taken(slots, "b")).done()
    slots.release("a")
    await asyncio.sleep(0)
    assert greedy[2].done()
    greedy[3].cancel()


async def test_server_without_keys_gives_all_slots_to_its_clients() -> None:
    slots = Slots(3, per_owner=2)
    assert [(await taken(slots, Origin().owner)).done() for _ in range(3)] == [True] * 3
    last = await taken(slots, Origin().owner)
    assert not last.done()
    slots.release(Origin().owner)
    await last


async def test_free_slot_goes_to_the_key_with_the_fewest() -> None:
    slots = Slots(6, per_owner=3)
    for owner in "aabbbc":
        assert (await taken(slots, owner)).done()
    waiting = {owner: await taken(slots, owner) for owner in "aac"}
    slots.release("b")
    await asyncio.sleep(0)
    assert [owner for owner, task in waiting.items() if task.done()] == ["c"]
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


@pytest.mark.parametrize("is_granted", [False, True])
async def test_cancelled_wait_loses_no_slot(is_granted: bool) -> None:
    slots = Slots(1)
    await slots.acquire("a")
    waiting = await taken(slots, "b")
    if is_granted:
        slots.release("a")
    waiting.cancel()
    await asyncio.wait({waiting})
    if not is_granted:
        slots.release("a")
    assert (await taken(slots, "c")).done()


async def test_waiter_that_is_cancelled_in_the_moment_of_its_grant_gets_no_slot() -> None:
    slots = Slots(1)
    await slots.acquire("a")
    first, second = await taken(slots, "b"), await taken(slots, "c")
    first.cancel()
    slots.release("a")  # before the cancelled task has run
    await asyncio.wait({first, second})
    assert first.cancelled()
    assert (slots.in_use, slots.waiting) == (1, 0)


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}


async def saturated(slots: Slots, waiting: dict[str, int]) -> list[tuple[str, asyncio.Task[None]]]:
    """Let each owner wait for its number of slots, one owner after the other: the first is the one that floods."""
    return [(owner, await taken(slots, owner)) for owner, count in waiting.items() for _ in range(count)]


async def finished(tasks: list[tuple[str, asyncio.Task[None]]]) -> None:
    for _, task in tasks:
        task.cancel()
    await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)


@given(
    most=st.integers(1, 4),
    steps=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["take", "give", "cancel"]), st.booleans()), max_size=30
    ),
)
async def test_slots_are_neither_exceeded_nor_left_free(most: int, steps: list[tuple[str, str, bool]]) -> None:
    slots = Slots(most, weigh=WEIGHTS.__getitem__)
    tasks: list[tuple[str, asyncio.Task[None]]] = []
    held: Counter[str] = Counter()
    for owner, step, is_followed_at_once in steps:
        if step == "take":
            tasks.append((owner, await taken(slots, owner)))
        elif step == "cancel" and (own := [task for name, task in tasks if name == owner and not task.done()]):
            own[0].cancel()
        elif step == "give" and slots.held[owner]:
            slots.release(owner)
            held[owner] -= 1
        if is_followed_at_once:
            continue
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert slots.in_use <= most
        assert slots.in_use == most or slots.waiting == 0
        granted = sum(task.done() and not task.cancelled() for _, task in tasks)
        assert slots.in_use == granted + sum(held.values())
    await finished(tasks)


@given(most=st.integers(3, 30))
async def test_slots_of_a_full_server_are_shared_by_weight(most: int) -> None:
    slots = Slots(most, weigh=WEIGHTS.__getitem__)
    tasks = await saturated(slots, dict.fromkeys(WEIGHTS, 5 * most))
    for _ in range(3 * most):  # the first has all slots at first, and gives them back one by one
        slots.release(max(slots.held, key=lambda owner: slots.held[owner] / WEIGHTS[owner]))
    least = min(slots.held[owner] / WEIGHTS[owner] for owner in WEIGHTS)
    assert all((slots.held[owner] - 1) / WEIGHTS[owner] <= least for owner in WEIGHTS)
    await finished(tasks)


@given(flood=st.integers(1, 40), most=st.integers(1, 4))
async def test_flood_of_one_owner_delays_another_by_one_grant_at_most(flood: int, most: int) -> None:
    slots = Slots(most)
    tasks = await saturated(slots, {"a": most + flood, "b": 1})
    for _ in range(2):
        slots.release("a")
        await asyncio.sleep(0)
    assert slots.held["b"] == 1
    await finished(tasks)


@given(st.dictionaries(st.sampled_from("abc"), st.integers(20, 30), min_size=2))
async def test_single_slot_is_given_in_turn_by_weight(waiting: dict[str, int]) -> None:
    slots = Slots(1, weigh=WEIGHTS.__getitem__)
    tasks = await saturated(slots, waiting)
    given: Counter[str] = Counter()
    for _ in range(20):
        (owner,) = slots.held
        given[owner] += 1
        slots.release(owner)
        await asyncio.sleep(0)
    shares = sorted(given[owner] / WEIGHTS[owner] for owner in waiting)
    assert all(after - before <= 1.0 for before, after in pairwise(shares))
    await finished(tasks)


async def test_owner_that_comes_back_has_saved_nothing_up() -> None:
    slots = Slots(1)
    tasks = await saturated(slots, {"a": 11})
    for _ in range(10):
        slots.release("a")
    tasks += await saturated(slots, {"b": 5, "a": 5})
    order = []
    for _ in range(6):
        (owner,) = slots.held
        order.append(owner)
        slots.release(owner)
        await asyncio.sleep(0)
    assert order.count("b") <= 4
    await finished(tasks)


async def test_slots_forget_owners_that_are_gone() -> None:
    slots = Slots(2)
    for owner in "abcdef":
        async with slots.slot(owner):
            pass
    assert not slots.held
    assert not slots._received
    assert not slots._waiting


@given(
    limit=st.integers(0, 4),
    per_owner=st.none() | st.integers(1, 3),
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["request", "release", "withdraw"])), max_size=40),
)
async def test_each_request_begins_once_in_its_order_or_is_withdrawn(
    limit: int, per_owner: int | None, steps: list[tuple[str, str]]
) -> None:
    slots = Slots(limit, per_owner)
    waiting: dict[str, list[int]] = {owner: [] for owner in "abc"}
    running = Counter[str]()

    def begin(owner: str, number: int) -> None:
        assert waiting[owner].pop(0) == number
        running[owner] += 1

    for number, (owner, step) in enumerate(steps):
        if step == "request":
            waiting[owner].append(number)
            slots.request(owner, number, partial(begin, owner, number))
        elif step == "release" and running[owner]:
            running[owner] -= 1
            slots.release(owner)
        elif step == "withdraw" and waiting[owner]:
            assert slots.withdraw(owner, waiting[owner].pop())
            assert not slots.withdraw(owner, number)
        assert slots.in_use == running.total() <= limit
        assert {owner: slots.waiting_of(owner) for owner in "abc"} == {key: len(own) for key, own in waiting.items()}
        most = limit if per_owner is None else per_owner
        assert slots.in_use == limit or all(running[owner] >= most for owner, own in waiting.items() if own)
        assert max(running.values(), default=0) <= most
