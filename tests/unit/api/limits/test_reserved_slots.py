"""Reserved slots: the servers of a store never use more than there are, and give back what they do not use."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import pytest

from penstock.api.limits import admission as admission_module
from penstock.api.limits import reserved_slots
from penstock.api.limits.admission import Admission
from penstock.api.limits.reserved_slots import LocalReservations, ReservedSlots
from penstock.api.limits.table import KeyLimits
from penstock.pipeline.errors import LimitReached, StoreFailed
from penstock.services.store.store import Store
from tests.support.api_clients import PATIENCE, wait_until
from tests.support.stores import open_store

pytestmark = pytest.mark.io


def admission(store: Store | None = None, **tables: KeyLimits) -> Admission:
    return Admission(tables=tables, reservations=store.reservations if store else LocalReservations())


@asynccontextmanager
async def servers(store_at: str, count: int) -> AsyncIterator[list[Store]]:
    async with AsyncExitStack() as opened:
        stores = [await opened.enter_async_context(open_store(store_at)) for _ in range(count)]
        for number, store in enumerate(stores):
            await store.servers.join(f"http://server{number}")
        yield stores


def patiently(admission: Admission, owner: str) -> AbstractAsyncContextManager[None]:
    """Count a response that waits for as long as a busy machine takes to give a slot back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission_module, "PATIENCE", PATIENCE)
        return admission.responding(owner)


async def test_responses_at_once_are_those_of_the_key_and_of_all_keys() -> None:
    limited = admission(default=KeyLimits(responses=1), all=KeyLimits(responses=2))
    async with limited.responding("a"), limited.responding("b"):
        for owner in "ac":
            with pytest.raises(LimitReached):
                async with limited.responding(owner):
                    pass
    async with limited.responding("a"):
        pass


async def test_servers_never_use_more_slots_than_there_are(store_at: str) -> None:
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
        assert max(highest.values()) <= most
        async with AsyncExitStack() as held:
            for each in shared:
                await held.enter_async_context(patiently(each, "a"))
            with pytest.raises(LimitReached):
                await held.enter_async_context(shared[0].responding("a"))


async def test_slot_that_is_given_back_can_be_used_at_another_server(store_at: str) -> None:
    assert 2 * (reserved_slots.KEEP + reserved_slots.RETRY) < reserved_slots.PATIENCE
    async with servers(store_at, 2) as stores:
        shared = [admission(store, default=KeyLimits(responses=1)) for store in stores]
        for number in range(4):  # of a client that sends one request after another, through a balancer
            async with patiently(shared[number % 2], "a"):
                with pytest.raises(LimitReached):
                    async with shared[1 - number % 2].responding("a"):
                        pass


async def test_slots_that_are_not_used_are_given_back(store: Store) -> None:
    await store.servers.join("http://server")
    own = ReservedSlots(store.reservations, "a", "responses")
    assert await own.enter(2)
    assert await own.enter(2)
    own.leave()
    await wait_until(lambda: own.reserved == 1)
    own.leave()
    await wait_until(lambda: own.giving_back is None)
    assert await store.reservations.reserve("a", "responses", 2, 2)


async def test_slots_of_a_server_that_has_left_are_free(store_at: str) -> None:
    async with servers(store_at, 2) as (one, other):
        assert await one.reservations.reserve("a", "responses", 2, 2)
        assert not await other.reservations.reserve("a", "responses", 1, 2)
        await one.servers.leave()
        assert await other.reservations.reserve("a", "responses", 2, 2)
        await other.sweep(60, 60)
        rows = await other.context.read("select server_id, held from places where server_id <> ''")
        assert [tuple(row) for row in rows] == [(other.server_id, 2)]


async def test_slot_is_held_again_without_the_store_while_the_load_is_steady() -> None:
    class Counting(LocalReservations):
        calls = 0

        async def reserve(self, owner: str, kind: str, count: int, most: int) -> bool:
            self.calls += 1
            return await super().reserve(owner, kind, count, most)

    reservations = Counting()
    own = ReservedSlots(reservations, "a", "responses")
    for _ in range(1000):
        assert await own.enter(5)
        own.leave()
    assert reservations.calls < 1000  # one for each pause of the machine in which the place was given back


class Failing(LocalReservations):
    fails = True

    async def reserve(self, owner: str, kind: str, count: int, most: int) -> bool:
        if self.fails:
            raise StoreFailed("The store cannot be reached.")
        return await super().reserve(owner, kind, count, most)

    async def lower(self, owner: str, kind: str, count: int) -> None:
        if self.fails:
            raise StoreFailed("The store cannot be reached.")


async def test_server_counts_alone_while_the_store_cannot_be_reached() -> None:
    own = ReservedSlots(Failing(), "a", "responses")
    assert [await own.enter(2, patience=0) for _ in range(3)] == [True, True, False]


async def test_slots_are_given_back_after_an_outage() -> None:
    reservations = Failing()
    reservations.fails = False
    own = ReservedSlots(reservations, "a", "responses")
    assert await own.enter(1)
    reservations.fails = True
    own.leave()
    await asyncio.sleep(3 * reserved_slots.KEEP)
    assert own.reserved == 1
    reservations.fails = False
    await wait_until(lambda: not own.reserved)


@pytest.mark.parametrize("steps", range(8))
async def test_client_that_leaves_while_a_slot_is_taken_for_it_keeps_none(store_at: str, steps: int) -> None:
    async with servers(store_at, 2) as (one, other):
        own = ReservedSlots(one.reservations, "a", "responses")
        leaving = asyncio.create_task(own.enter(1))
        for _ in range(steps):
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        if leaving.cancelled():
            assert await ReservedSlots(other.reservations, "a", "responses").enter(1, patience=PATIENCE)


async def test_slot_that_was_taken_as_the_store_failed_is_given_back() -> None:
    class Losing(LocalReservations):
        lowered = -1

        async def reserve(self, owner: str, kind: str, count: int, most: int) -> bool:
            raise StoreFailed("The answer of the store was lost.")

        async def lower(self, owner: str, kind: str, count: int) -> None:
            self.lowered = count

    reservations = Losing()
    own = ReservedSlots(reservations, "a", "responses")
    assert await own.enter(1)
    own.leave()
    await wait_until(lambda: reservations.lowered == 0)


async def test_running_responses_count_when_a_limit_is_set() -> None:
    own = ReservedSlots(LocalReservations(), "a", "responses")
    assert await own.enter(None)
    assert not await own.enter(1, patience=0)
    assert await own.enter(2, patience=0)


async def test_limit_that_is_lowered_holds_for_the_next_response() -> None:
    own = ReservedSlots(LocalReservations(), "a", "responses")
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
