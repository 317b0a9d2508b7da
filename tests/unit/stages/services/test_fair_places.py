"""Places: never too many, never one free while an owner that may have it waits, and fair by weight."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.frames import Origin
from penstock.stages.services.fair_places import FairPlaces


async def taken(places: FairPlaces, owner: str) -> asyncio.Task[None]:
    task = asyncio.create_task(places.take(owner))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_one_key_gets_at_most_half_of_the_places() -> None:
    places = FairPlaces(4, share=2)
    greedy = [await taken(places, "a") for _ in range(4)]
    assert [task.done() for task in greedy] == [True, True, False, False]
    assert (await taken(places, "b")).done()
    places.give_back("a")
    await asyncio.sleep(0)
    assert greedy[2].done()
    greedy[3].cancel()


async def test_server_without_keys_gives_all_places_to_its_clients() -> None:
    places = FairPlaces(3, share=2)
    assert [(await taken(places, Origin().owner)).done() for _ in range(3)] == [True] * 3
    last = await taken(places, Origin().owner)
    assert not last.done()
    places.give_back(Origin().owner)
    await last


async def test_free_place_goes_to_the_key_with_the_fewest() -> None:
    places = FairPlaces(6, share=3)
    for owner in "aabbbc":
        assert (await taken(places, owner)).done()
    waiting = {owner: await taken(places, owner) for owner in "aac"}
    places.give_back("b")
    await asyncio.sleep(0)
    assert [owner for owner, task in waiting.items() if task.done()] == ["c"]
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


@pytest.mark.parametrize("is_granted", [False, True])
async def test_cancelled_wait_loses_no_place(is_granted: bool) -> None:
    places = FairPlaces(1)
    await places.take("a")
    waiting = await taken(places, "b")
    if is_granted:
        places.give_back("a")
    waiting.cancel()
    await asyncio.wait({waiting})
    if not is_granted:
        places.give_back("a")
    assert (await taken(places, "c")).done()


async def test_waiter_that_is_cancelled_in_the_moment_of_its_grant_gets_no_place() -> None:
    places = FairPlaces(1)
    await places.take("a")
    first, second = await taken(places, "b"), await taken(places, "c")
    first.cancel()
    places.give_back("a")  # before the cancelled task has run
    await asyncio.wait({first, second})
    assert first.cancelled()
    assert (places.in_use, places.waiting) == (1, 0)


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}


async def saturated(places: FairPlaces, waiting: dict[str, int]) -> list[tuple[str, asyncio.Task[None]]]:
    """Let each owner wait for so many places, one owner after the other: the first is the one that floods."""
    return [(owner, await taken(places, owner)) for owner, count in waiting.items() for _ in range(count)]


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
async def test_places_are_neither_exceeded_nor_left_free(most: int, steps: list[tuple[str, str, bool]]) -> None:
    places = FairPlaces(most, weigh=WEIGHTS.__getitem__)
    tasks: list[tuple[str, asyncio.Task[None]]] = []
    held: Counter[str] = Counter()
    for owner, step, is_followed_at_once in steps:
        if step == "take":
            tasks.append((owner, await taken(places, owner)))
        elif step == "cancel" and (own := [task for name, task in tasks if name == owner and not task.done()]):
            own[0].cancel()
        elif step == "give" and places._held[owner]:
            places.give_back(owner)
            held[owner] -= 1
        if is_followed_at_once:
            continue
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert places.in_use <= most
        assert places.in_use == most or places.waiting == 0
        granted = sum(task.done() and not task.cancelled() for _, task in tasks)
        assert places.in_use == granted + sum(held.values())
    await finished(tasks)


@given(most=st.integers(3, 30))
async def test_places_of_a_full_server_are_shared_by_weight(most: int) -> None:
    places = FairPlaces(most, weigh=WEIGHTS.__getitem__)
    tasks = await saturated(places, dict.fromkeys(WEIGHTS, 5 * most))
    for _ in range(3 * most):  # the first has all places at first, and gives them back one by one
        places.give_back(max(places._held, key=lambda owner: places._held[owner] / WEIGHTS[owner]))
    least = min(places._held[owner] / WEIGHTS[owner] for owner in WEIGHTS)
    assert all((places._held[owner] - 1) / WEIGHTS[owner] <= least for owner in WEIGHTS)
    await finished(tasks)


@given(flood=st.integers(1, 40), most=st.integers(1, 4))
async def test_flood_of_one_owner_delays_another_by_one_grant_at_most(flood: int, most: int) -> None:
    places = FairPlaces(most)
    tasks = await saturated(places, {"a": most + flood, "b": 1})
    for _ in range(2):
        places.give_back("a")
        await asyncio.sleep(0)
    assert places._held["b"] == 1
    await finished(tasks)


@given(st.dictionaries(st.sampled_from("abc"), st.integers(20, 30), min_size=2))
async def test_single_place_is_given_in_turn_by_weight(waiting: dict[str, int]) -> None:
    places = FairPlaces(1, weigh=WEIGHTS.__getitem__)
    tasks = await saturated(places, waiting)
    given: Counter[str] = Counter()
    for _ in range(20):
        (owner,) = places._held
        given[owner] += 1
        places.give_back(owner)
        await asyncio.sleep(0)
    shares = sorted(given[owner] / WEIGHTS[owner] for owner in waiting)
    assert all(after - before <= 1.0 for before, after in pairwise(shares))
    await finished(tasks)


async def test_owner_that_comes_back_has_saved_nothing_up() -> None:
    places = FairPlaces(1)
    tasks = await saturated(places, {"a": 11})
    for _ in range(10):
        places.give_back("a")
    tasks += await saturated(places, {"b": 5, "a": 5})
    order = []
    for _ in range(6):
        (owner,) = places._held
        order.append(owner)
        places.give_back(owner)
        await asyncio.sleep(0)
    assert order.count("b") <= 4
    await finished(tasks)


async def test_places_forget_owners_that_are_gone() -> None:
    places = FairPlaces(2)
    for owner in "abcdef":
        async with places.place(owner):
            pass
    assert not places._held
    assert not places._received
    assert not places._waiting
