"""PostgreSQL alone: its server, its schema, and its outages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from penstock.pipeline.errors import StoreFailed
from penstock.services.runs.event_log import Block
from penstock.services.store.database import DatabaseUnavailable
from penstock.services.store.postgres import PostgresDatabase, _named_errors
from penstock.services.store.store import Store
from tests.support.stored_responses import begun_response, store_response, stored_conversation, stored_response
from tests.support.stores import ExternalPostgres, PostgresServer, empty_schema, open_store, running_postgres

pytestmark = pytest.mark.io


@pytest.fixture
async def url(postgres: PostgresServer | ExternalPostgres) -> AsyncIterator[str]:
    """The URL of an empty schema."""
    async with empty_schema(postgres) as url:
        yield url


async def ask(url: str, sql: str) -> None:
    """Run a statement on a connection of its own."""
    connection = await asyncpg.connect(url)
    await connection.execute(sql)
    await connection.close()


async def test_transaction_of_a_server_that_stands_still_ends(url: str) -> None:
    """Others would wait for its rows, and with them all of their writes."""
    database = PostgresDatabase(url)
    await database.open()
    assert await (await database._connected()).fetchval("show idle_in_transaction_session_timeout") == "10s"
    await database.close()


async def test_servers_that_start_together_make_one_schema(url: str) -> None:
    stores = [Store(PostgresDatabase(url)) for _ in range(5)]
    await asyncio.gather(*(store.open() for store in stores))
    await asyncio.gather(*(store_response(store, stored_response(f"resp_{n}")) for n, store in enumerate(stores)))
    assert await stores[0].get("resp_4", "") == stored_response("resp_4")
    await asyncio.gather(*(store.close() for store in stores))


async def test_newer_schema_is_refused(url: str) -> None:
    await ask(url, "create table schema_version (version bigint); insert into schema_version values (99)")
    with pytest.raises(StoreFailed, match="schema version 99, and this penstock knows versions up to"):
        await Store(PostgresDatabase(url)).open()
    await ask(url, "create table responses (id text)")


@pytest.mark.parametrize(
    ("url", "received"),
    [
        ("postgresql://ann:secret@127.0.0.1:1/responses", "127.0.0.1:1/responses cannot be opened"),
        ("postgresql://ann:secret@127.0.0.1:port/responses", "cannot be opened"),
        ("postgresql://ann:secret@[::1/responses", "cannot be opened"),
        ("postgresql://ann:secret@127.0.0.1:1/responses?sslmode=secret", "cannot be opened"),
    ],
)
async def test_connection_error_hides_the_password(url: str, received: str) -> None:
    store = Store(PostgresDatabase(url))
    with pytest.raises(StoreFailed, match=received) as failure:
        await store.open()
    assert "secret" not in str(failure.value)
    assert failure.value.__suppress_context__
    assert "\n" not in str(failure.value)
    await store.close()


async def test_missing_database_is_refused(postgres: PostgresServer | ExternalPostgres) -> None:
    with pytest.raises(StoreFailed, match="does not exist"):
        await Store(PostgresDatabase(postgres.url.replace("/postgres", "/nowhere"))).open()


async def test_database_that_cannot_be_written_is_refused(url: str) -> None:
    """Opening writes the version, so that `penstock check` finds a standby, and a role that may only read."""
    async with open_store(url):
        pass
    with pytest.raises(StoreFailed, match="in a read-only transaction"):
        await Store(PostgresDatabase(f"{url}&default_transaction_read_only=on")).open()


@pytest.mark.defect("18")
async def test_restarted_postgres_loses_nothing() -> None:
    with running_postgres() as server:
        async with open_store(server.url) as store:
            await store_response(store, stored_response("resp_1"))
            store.begin(begun_response(stored_response("resp_2")))
            store.append("resp_2", Block(0, 1, b"before"))
            await asyncio.to_thread(server.stop)
            store.append("resp_2", Block(1, 1, b"during"))
            with pytest.raises(StoreFailed, match="cannot be reached"):
                await store.delete("resp_1", "")
            with pytest.raises(StoreFailed, match="cannot be read"):
                await store.get("resp_1", "")
            assert store.is_degraded
            ended = store.end(stored_response("resp_2"), Block(2, 1, b"end"))
            await asyncio.to_thread(server.start)
            await asyncio.wait_for(ended, 120)
            assert not store.is_degraded
            assert await store.get("resp_1", "") == stored_response("resp_1")
            assert await store.get("resp_2", "") == stored_response("resp_2")
            assert [block.data for block in await store.blocks("resp_2")] == [b"before", b"during", b"end"]


async def test_lost_connection_is_reopened(url: str) -> None:
    async with open_store(url) as store:
        await store_response(store, stored_response("resp_1"))
        await ask(url, "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'penstock'")
        await store_response(store, stored_response("resp_2"))
        assert await store.get("resp_1", "") == stored_response("resp_1")
        assert await store.get("resp_2", "") == stored_response("resp_2")


async def test_deadlocked_groups_are_retried(url: str) -> None:
    """Two servers' groups need the same rows in opposite order, and both succeed.

    PostgreSQL aborts the transaction that notices the deadlock.  The test repeats until it is the store's.
    """
    async with open_store(url) as store:
        for name in ("conv_1", "conv_2"):
            await store.conversations.create(stored_conversation(name), "")
        other = await asyncpg.connect(url)
        while not await _deadlock(store, other):
            pass
        await other.close()
        assert not store.is_degraded


async def _deadlock(store: Store, other: asyncpg.Connection) -> bool:
    """Let a store and a transaction take two rows in opposite order.  Return true if the store was the victim."""
    transaction = other.transaction()
    await transaction.start()
    await other.execute("update conversations set metadata = '{}' where id = 'conv_2'")
    updates = asyncio.gather(*(store.conversations.update(f"conv_{n}", "", {"a": "b"}) for n in (1, 2)))
    while not await other.fetchval("select count(*) from pg_locks where not granted"):
        await asyncio.sleep(0.01)
    is_store_broken_off = True
    try:
        await other.execute("update conversations set metadata = '{}' where id = 'conv_1'")
    except asyncpg.DeadlockDetectedError:
        is_store_broken_off = False
        await transaction.rollback()
    else:
        await transaction.commit()
    assert await updates == [stored_conversation("conv_1", a="b"), stored_conversation("conv_2", a="b")]
    return is_store_broken_off


async def test_end_and_claim_exclude_each_other(url: str) -> None:
    async with open_store(url, stale=0) as one, open_store(url, stale=0) as two:
        for number in range(20):
            one.begin(begun_response(stored_response(f"resp_{number}")))
        await one.writer.flushed()
        orphans = await two.orphans()
        claims = asyncio.gather(*(two.claim(orphan) for orphan in orphans))
        ends = [one.end(stored_response(orphan.stored.response.id), Block(0, 1, b"x")) for orphan in orphans]
        claimed = await claims
        await asyncio.gather(*ends)
        for orphan, is_claimed in zip(orphans, claimed, strict=True):
            kept = await one.get(orphan.stored.response.id, "")
            assert kept is not None
            assert (kept.response.status == "in_progress") is is_claimed
            assert (await one.blocks(kept.response.id) == ()) is is_claimed


def test_connection_in_a_broken_state_is_reopened() -> None:
    with pytest.raises(DatabaseUnavailable), _named_errors():
        raise asyncpg.InternalClientError("cannot switch to state 15; another operation (2) is in progress")
