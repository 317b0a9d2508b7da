"""The record of containers: which server has each, for how long, and for whom."""

from __future__ import annotations

import time
from dataclasses import replace

from penstock.extensions.tools.sandbox.stored_containers import KEPT, StoredContainers
from penstock.services.containers import Described
from penstock.services.store.store import Store
from tests.support.stores import open_store

NOW = time.time()
ONE = Described("cntr_1", "alice", "mine", NOW, NOW, 60.0, "1g")


async def test_container_is_found_by_its_owner_alone(store_at: str) -> None:
    async with open_store(store_at) as store:
        await store.servers.join("http://one")
        await store.part(StoredContainers).add(ONE)
        found = await store.part(StoredContainers).find(["cntr_1", "cntr_2", "\0"], "alice")
        assert [each.described for each in found.values()] == [ONE]
        assert (found["cntr_1"].server_id, found["cntr_1"].url) == (store.server_id, "http://one")
        assert await store.part(StoredContainers).find(["cntr_1"], "bob") == {}
        assert await store.part(StoredContainers).find([], "alice") == {}
        assert [each.described for each in await store.part(StoredContainers).of("alice", 10)] == [ONE]
        assert await store.part(StoredContainers).of("bob", 10) == []
        assert not await store.part(StoredContainers).forget("cntr_1", "bob")
        assert await store.part(StoredContainers).forget("cntr_1", "alice")
        assert await store.part(StoredContainers).find(["cntr_1"], "alice") == {}


async def test_container_may_have_any_name(store_at: str) -> None:
    names = ["", "\0", "\ud800", 'say "hi"', "日本", "null", "1"]
    async with open_store(store_at) as store:
        for name in names:
            await store.part(StoredContainers).add(replace(ONE, name=name))
            (found,) = (await store.part(StoredContainers).find(["cntr_1"], "alice")).values()
            assert found.described.name == name


async def test_container_ends_with_its_server(store_at: str) -> None:
    async with open_store(store_at) as one, open_store(store_at) as other:
        await one.servers.join("http://one")
        await other.servers.join("http://other")
        await one.part(StoredContainers).add(ONE)
        assert await _is_live(other)
        assert list(await other.part(StoredContainers).elsewhere(["cntr_1"], "alice")) == ["cntr_1"]
        assert await one.part(StoredContainers).elsewhere(["cntr_1"], "alice") == {}
        await one.servers.leave()
        assert not await _is_live(other)
        assert await other.part(StoredContainers).elsewhere(["cntr_1"], "alice") == {}
        await other.part(StoredContainers).add(replace(ONE, name="anew"))
        assert await _is_live(one)


async def test_container_that_has_ended_is_known_for_a_day(store_at: str) -> None:
    async with open_store(store_at) as store:
        await store.servers.join("http://one")
        await store.part(StoredContainers).add(ONE)
        await store.part(StoredContainers).touch("cntr_1", NOW + 5)
        await store.part(StoredContainers).end("cntr_1")
        (found,) = (await store.part(StoredContainers).find(["cntr_1"], "alice")).values()
        assert found.described == replace(ONE, last_active_at=NOW + 5, is_live=False)
        await store.sweep(1e9, 1e9)
        assert await store.part(StoredContainers).find(["cntr_1"], "alice")
        await store.part(StoredContainers).touch("cntr_1", NOW - KEPT - 1)
        await store.sweep(1e9, 1e9)
        assert await store.part(StoredContainers).find(["cntr_1"], "alice") == {}


async def test_container_at_work_is_not_swept(store_at: str) -> None:
    async with open_store(store_at) as store:
        await store.servers.join("http://one")
        await store.part(StoredContainers).add(replace(ONE, last_active_at=NOW - KEPT - 1))
        await store.sweep(1e9, 1e9)
        assert await _is_live(store)


async def test_container_of_another_owner_is_not_replaced(store_at: str) -> None:
    async with open_store(store_at) as store:
        await store.servers.join("http://one")
        await store.part(StoredContainers).add(ONE)
        await store.part(StoredContainers).add(replace(ONE, owner="bob"))
        assert await store.part(StoredContainers).find(["cntr_1"], "bob") == {}
        assert await _is_live(store)


async def _is_live(store: Store) -> bool:
    (found,) = (await store.part(StoredContainers).find(["cntr_1"], "alice")).values()
    return found.described.is_live
