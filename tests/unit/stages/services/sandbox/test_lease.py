from __future__ import annotations

import asyncio

import pytest

from penstock.pipeline.frames import Origin
from penstock.stages.services.sandbox.lease import Places


async def taken(places: Places, owner: str) -> asyncio.Task[None]:
    task = asyncio.create_task(places.take(owner))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_one_key_gets_at_most_half_of_the_places() -> None:
    places = Places(4)
    greedy = [await taken(places, "a") for _ in range(4)]
    assert [task.done() for task in greedy] == [True, True, False, False]
    assert (await taken(places, "b")).done()
    places.give_back("a")
    await asyncio.sleep(0)
    assert greedy[2].done()
    greedy[3].cancel()


async def test_server_without_keys_gives_all_places_to_its_clients() -> None:
    places = Places(3)
    assert [(await taken(places, Origin().owner)).done() for _ in range(3)] == [True] * 3
    last = await taken(places, Origin().owner)
    assert not last.done()
    places.give_back(Origin().owner)
    await last


async def test_free_place_goes_to_the_key_with_the_fewest() -> None:
    places = Places(6)
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
    places = Places(1)
    await places.take("a")
    waiting = await taken(places, "b")
    if is_granted:
        places.give_back("a")
    waiting.cancel()
    await asyncio.wait({waiting})
    if not is_granted:
        places.give_back("a")
    assert (await taken(places, "c")).done()
