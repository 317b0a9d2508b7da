"""Places: the servers of a store never use more than there are, and give back what they do not use."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from penstock.api.limits import places
from penstock.api.limits.admission import Admission
from penstock.api.limits.places import OwnHolds, Places
from penstock.api.limits.table import KeyLimits
from penstock.pipeline.errors import LimitReached, StoreFailed
from penstock.stages.services.store.store import Store
from tests.support.api_clients import PATIENCE, wait_until
from tests.support.stores import open_store

pytestmark = pytest.mark.io


def admission(store: Store | None = None, **tables: KeyLimits) -> Admission:
    return Admission(tables=tables, holds=store.places if store else OwnHolds())


@asynccontextmanager
async def servers(store_at: str, count: int) -> AsyncIterator[list[Store]]:
    async with AsyncExitStack() as opened:
        stores = [await opened.enter_async_context(open_store(store_at)) for _ in range(count)]
        for number, store in enumerate(stores):
            await store.servers.join(f"http://server{number}")
        yield stores


async def test_responses_at_once_are_those_of_the_key_and_of_all_keys() -> None:
    limited = admission(default=KeyLimits(responses=1), all=KeyLimits(responses=2))
    async with limited.responding("a"), limited.responding("b"):
        for owner in "ac":
            with pytest.raises(LimitReached):
                async with limited.responding(owner):
                    pass
    async with limited.responding("a"):
        pass


async def test_servers_never_use_more_places_than_there_are(store_at: str) -> None:
    most, running, highest = 3, Counter[str](), Counter[str]()

    async def respond(admission: Admission, owner: str) -> None:
        for _ in range(8):
            try:
                async with admission.responding(owner):
                    running[owner] += 1
                    highest[owner] = max(highest[owner], running[owner])
                    await asyncio.sleep(0.002)
                    running[owner] -= 1
            except LimitReached:
                pass

    async with servers(store_at, 3) as stores:
        shared = [admission(store, default=KeyLimits(responses=most)) for store in stores]
        await asyncio.gather(*(respond(each, owner) for each in shared for owner in "aabb"))
        assert highest == {"a": most, "b": most}


async def test_place_that_is_given_back_can_be_used_at_another_server_at_once(store_at: str) -> None:
    async with servers(store_at, 2) as stores:
        shared = [admission(store, default=KeyLimits(responses=1)) for store in stores]
        for number in range(4):  # of a client that sends one request after another, through a balancer
            async with shared[number % 2].responding("a"):
                with pytest.raises(LimitReached):
                    async with shared[1 - number % 2].responding("a"):
                        pass


async def test_places_that_are_not_used_are_given_back(store: Store) -> None:
    await store.servers.join("http://server")
    own = Places(store.places, "a", "responses")
    assert await own.enter(2)
    assert await own.enter(2)
    own.leave()
    await wait_until(lambda: own.held == 1)
    own.leave()
    await wait_until(lambda: own._giving_back is None)
    assert await store.places.hold("a", "responses", 2, 2)


async def test_places_of_a_server_that_has_left_are_free(store_at: str) -> None:
    async with servers(store_at, 2) as (one, other):
        assert await one.places.hold("a", "responses", 2, 2)
        assert not await other.places.hold("a", "responses", 1, 2)
        await one.servers.leave()
        assert await other.places.hold("a", "responses", 2, 2)
        await other.sweep(60, 60)
        rows = await other._context.read("select server_id, held from places where server_id <> ''")
        assert [tuple(row) for row in rows] == [(other.server_id, 2)]


async def test_place_is_held_again_without_the_store_while_the_load_is_steady() -> None:
    class Counting(OwnHolds):
        calls = 0

        async def hold(self, owner: str, kind: str, count: int, most: int) -> bool:
            self.calls += 1
            return await super().hold(owner, kind, count, most)

    holds = Counting()
    own = Places(holds, "a", "responses")
    for _ in range(1000):
        assert await own.enter(5)
        own.leave()
    assert holds.calls < 1000  # one for each pause of the machine in which the place was given back


class Failing(OwnHolds):
    fails = True

    async def hold(self, owner: str, kind: str, count: int, most: int) -> bool:
        if self.fails:
            raise StoreFailed("The store cannot be reached.")
        return await super().hold(owner, kind, count, most)

    async def lower(self, owner: str, kind: str, count: int) -> None:
        if self.fails:
            raise StoreFailed("The store cannot be reached.")


async def test_server_counts_alone_while_the_store_cannot_be_reached() -> None:
    own = Places(Failing(), "a", "responses")
    assert [await own.enter(2, patience=0) for _ in range(3)] == [True, True, False]


async def test_places_are_given_back_after_an_outage() -> None:
    holds = Failing()
    holds.fails = False
    own = Places(holds, "a", "responses")
    assert await own.enter(1)
    holds.fails = True
    own.leave()
    await asyncio.sleep(3 * places.KEEP)
    assert own.held == 1
    holds.fails = False
    await wait_until(lambda: not own.held)


@pytest.mark.parametrize("steps", range(8))
async def test_client_that_leaves_while_a_place_is_taken_for_it_keeps_none(store_at: str, steps: int) -> None:
    async with servers(store_at, 2) as (one, other):
        own = Places(one.places, "a", "responses")
        leaving = asyncio.create_task(own.enter(1))
        for _ in range(steps):
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        if leaving.cancelled():
            assert await Places(other.places, "a", "responses").enter(1, patience=PATIENCE)


async def test_place_that_was_taken_as_the_store_failed_is_given_back() -> None:
    class Losing(OwnHolds):
        lowered = -1

        async def hold(self, owner: str, kind: str, count: int, most: int) -> bool:
            raise StoreFailed("The answer of the store was lost.")

        async def lower(self, owner: str, kind: str, count: int) -> None:
            self.lowered = count

    holds = Losing()
    own = Places(holds, "a", "responses")
    assert await own.enter(1)
    own.leave()
    await wait_until(lambda: holds.lowered == 0)


async def test_running_responses_count_when_a_limit_is_set() -> None:
    own = Places(OwnHolds(), "a", "responses")
    assert await own.enter(None)
    assert not await own.enter(1, patience=0)
    assert await own.enter(2, patience=0)


async def test_limit_that_is_lowered_holds_for_the_next_response() -> None:
    own = Places(OwnHolds(), "a", "responses")
    assert [await own.enter(3) for _ in range(3)] == [True] * 3
    own.leave()
    assert not await own.enter(2, patience=0)
    own.leave()
    assert await own.enter(2)


async def test_sandbox_waits_for_its_place() -> None:
    limited = admission(default=KeyLimits(sandboxes=1))
    entered = asyncio.Event()

    async def second() -> None:
        async with limited.sandbox("a"):
            entered.set()

    async with limited.sandbox("a"):
        waiting = asyncio.create_task(second())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(entered.wait()), 0.05)
    await waiting
