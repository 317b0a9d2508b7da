"""Several servers over one store: which one runs a response, and what happens when it dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace

from penstock.pipeline.errors import RunInterrupted, StoreFailed
from penstock.pipeline.frames import Origin, with_facts
from penstock.pipeline.protocol.tools import McpServer, Toolset
from penstock.pipeline.secret import Secret
from penstock.services.runs.event_log import Block
from penstock.services.store.database import DatabaseUnavailable, Unit
from penstock.services.store.store import Orphan, Server, Store
from tests.support.stored_responses import (
    ITEMS,
    begun_response,
    execute_sql,
    expire_heartbeats,
    queued_response,
    request_of,
    store_response,
    stored_response,
)
from tests.support.stores import FaultyDatabase, database_at, open_store


async def accept(store: Store, response_id: str = "resp_1") -> None:
    waiting = queued_response(response_id, ITEMS[0])
    await store.accept(waiting, request_of(waiting))


async def test_accepted_response_is_durable_with_its_request(store: Store, other: Store) -> None:
    await accept(store)
    assert await other.get("resp_1", "") == queued_response("resp_1", ITEMS[0])
    assert await store.queued("resp_1") == request_of(queued_response("resp_1", ITEMS[0]))


class Speechless(FaultyDatabase):
    """A database that commits every write, and may lose its connection before it confirms it."""

    is_speechless = False

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        counts = await super().write(units)
        if self.is_speechless:
            raise DatabaseUnavailable("The connection is lost.")
        return counts


async def test_uncertain_acceptance_is_revoked(store_at: str) -> None:
    kept = Speechless(database_at(store_at))
    store = Store(kept)
    await store.open()
    kept.is_speechless = True
    with pytest.raises(StoreFailed):
        await accept(store)
    kept.is_speechless = False
    assert await store.get("resp_1", "") is None
    assert await store.items([ITEMS[0].id], "") == {}
    await store.close()


async def test_response_taken_over_is_not_run(store: Store, other: Store) -> None:
    await accept(store)
    await expire_heartbeats(store)
    (orphan,) = await other.orphans()
    assert await other.claim(orphan)
    assert await store.queued("resp_1") is None
    assert await other.queued("resp_1") is not None


async def test_request_that_is_no_unicode_is_accepted(store: Store) -> None:
    waiting = queued_response("resp_1", instructions="\ud800")
    await store.accept(waiting, request_of(waiting))
    assert await store.queued("resp_1") == request_of(waiting)


async def test_background_response_goes_from_queued_to_its_end(store: Store) -> None:
    await accept(store)
    done = replace(stored_response("resp_1", ITEMS[0], background=True), tokens={"msg_resp_1": (5,)})
    store.start(begun_response(done).response)
    store.append("resp_1", Block(0, 3, b"abc"))
    assert await store.get("resp_1", "") == begun_response(done)
    assert await store.queued("resp_1") is not None
    await store.end(done, None)
    assert await store.get("resp_1", "") == done
    assert await store.queued("resp_1") is None
    assert await store.blocks("resp_1") == (Block(0, 3, b"abc"),)


@pytest.mark.parametrize("text", ["Be brief.", "half a pair \ud800, NUL \0"])
async def test_request_is_stored_without_its_secrets(store: Store, text: str) -> None:
    server = McpServer("maps", "https://maps.example/mcp", Secret({"Authorization": "Bearer canary"}))
    waiting = queued_response("resp_1", ITEMS[0], instructions=text)
    request = replace(with_facts(request_of(waiting), tools=Toolset(servers=(server,))), results={"ci_1": text})
    await store.accept(waiting, request)
    kept = await store.queued("resp_1")
    assert kept is not None
    assert kept == request
    assert kept.facts.tools.servers[0].headers.reveal() == {}
    ((row,),) = await store.context.read("select request from responses")
    assert "maps.example" in row
    assert "canary" not in row


@pytest.mark.parametrize("text", ["Be brief.", "half a pair \ud800"])
async def test_request_with_the_facts_of_recording_format_1_is_read(store: Store, text: str) -> None:
    waiting = queued_response("resp_1", ITEMS[0], instructions=text)
    request = request_of(waiting)
    await store.accept(waiting, request)
    fields = msgspec.to_builtins(request.facts)
    old = json.dumps({"type": "Conversation", **fields, "history": []}, separators=(",", ":"))
    await execute_sql(store, f"update responses set request = '{old.replace(chr(39), chr(39) * 2)}'")
    read = await store.queued("resp_1")
    assert read is not None
    assert replace(read.facts, response=request.facts.response) == request.facts


@pytest.mark.parametrize("text", ["Be brief.", "half a pair \ud800"])
async def test_request_with_the_facts_of_recording_format_2_is_read(store: Store, text: str) -> None:
    waiting = queued_response("resp_1", ITEMS[0], instructions=text)
    request = with_facts(request_of(waiting), options={"browser": {"domains": ["a.org"]}})
    await store.accept(waiting, request)
    frame = msgspec.to_builtins(request)
    frame["facts"]["web"] = frame["facts"].pop("options")["browser"]
    old = json.dumps(frame, separators=(",", ":"))
    await execute_sql(store, f"update responses set request = '{old.replace(chr(39), chr(39) * 2)}'")
    read = await store.queued("resp_1")
    assert read is not None
    assert read.facts.options == request.facts.options
    assert replace(read.facts, response=request.facts.response) == request.facts


async def test_request_of_another_version_interrupts_the_run(store: Store) -> None:
    await accept(store)
    await execute_sql(store, "update responses set request = '{}'")
    with pytest.raises(RunInterrupted):
        await store.queued("resp_1")


async def test_runner_of_a_response_is_known(store: Store, other: Store) -> None:
    await store.servers.join("http://one")
    store.begin(begun_response(stored_response("resp_1")))
    await accept(store, "resp_2")
    for response_id in ("resp_1", "resp_2"):
        assert await other.runner(response_id) == Server(store.server_id, "http://one", is_alive=True)
    await expire_heartbeats(store)
    assert await other.runner("resp_1") == Server(store.server_id, "http://one", is_alive=False)
    await store.servers.beat()
    assert await other.runner("resp_1") == Server(store.server_id, "http://one", is_alive=True)
    await store.end(stored_response("resp_1"), None)
    assert await other.runner("resp_1") is None
    store.release("resp_2")
    assert await store.get("resp_2", "")
    assert await other.runner("resp_2") is None


async def test_server_knows_if_it_was_silent(store: Store) -> None:
    await store.servers.join("http://one")
    assert await store.servers.go_on()
    await expire_heartbeats(store)
    assert not await store.servers.go_on()
    await store.servers.beat()
    assert await store.servers.go_on()
    await store.servers.leave()
    assert not await store.servers.go_on()


async def test_live_server_has_no_orphans(store: Store, other: Store) -> None:
    await store.servers.join("http://one")
    store.begin(begun_response(stored_response("resp_1")))
    await accept(store, "resp_2")
    await store_response(store, stored_response("resp_3"))
    assert await other.orphans() == ()
    await store.servers.leave()
    assert await store.orphans() == ()
    assert len(await other.orphans()) == 2


async def test_responses_of_a_dead_server_are_orphans(store: Store, other: Store) -> None:
    await store.servers.join("http://one")
    foreground = replace(begun_response(stored_response("resp_1")), origin=Origin("ann"))
    store.begin(foreground)
    background = queued_response("resp_2")
    await store.accept(background, request_of(background))
    await store_response(store, stored_response("resp_3"))
    await expire_heartbeats(store)
    assert await other.orphans() == (
        Orphan(foreground, store.server_id, is_background=False),
        Orphan(background, store.server_id, is_background=True),
    )


async def test_server_that_looks_dead_itself_finds_no_orphans(store: Store, other: Store) -> None:
    """After a jump of the clock every server looks dead until its next heartbeat."""
    await store.servers.join("http://one")
    store.begin(begun_response(stored_response("resp_1")))
    await store.writer.flushed()
    await other.servers.join("http://two")
    await expire_heartbeats(store)
    assert await other.orphans() == ()
    await other.servers.beat()
    assert len(await other.orphans()) == 1


async def test_server_at_a_known_address_replaces_the_dead_one(store: Store, other: Store) -> None:
    await store.servers.join("http://one")
    store.begin(begun_response(stored_response("resp_1")))
    await store.writer.flushed()
    await other.servers.join("http://two")
    assert await other.orphans() == ()
    await other.servers.join("http://one")
    (orphan,) = await other.orphans()
    assert orphan.server_id == store.server_id


async def test_equal_address_on_another_machine_is_another_server(store: Store, other: Store) -> None:
    await store.servers.join("http://127.0.0.1:8000")
    store.begin(begun_response(stored_response("resp_1")))
    await store.writer.flushed()
    other.servers.machine = "another"
    await other.servers.join("http://127.0.0.1:8000")
    assert await other.orphans() == ()


async def test_one_server_wins_an_orphan(store: Store, store_at: str) -> None:
    for number in range(4):
        store.begin(begun_response(stored_response(f"resp_{number}")))
    await store.writer.flushed()
    async with open_store(store_at) as one, open_store(store_at) as two, open_store(store_at) as three:
        others = (one, two, three)
        found = await asyncio.gather(*(each.orphans() for each in others))
        claims = [(each, orphan) for each, orphans in zip(others, found, strict=True) for orphan in orphans]
        won = await asyncio.gather(*(each.claim(orphan) for each, orphan in claims))
    assert len(won) == 12
    assert sorted(o.stored.response.id for (_, o), is_won in zip(claims, won, strict=True) if is_won) == [
        f"resp_{number}" for number in range(4)
    ]


async def test_server_that_beats_again_keeps_its_runs(store: Store, other: Store) -> None:
    await store.servers.join("http://one")
    store.begin(begun_response(stored_response("resp_1")))
    await store.writer.flushed()
    await expire_heartbeats(store)
    (orphan,) = await other.orphans()
    await store.servers.beat()
    assert not await other.claim(orphan)


async def test_server_taken_for_dead_overwrites_nothing(store: Store, other: Store) -> None:
    store.begin(begun_response(stored_response("resp_1")))
    store.append("resp_1", Block(0, 1, b"a"))
    await store.writer.flushed()
    (orphan,) = await other.orphans()
    assert await other.claim(orphan)
    store.start(stored_response("resp_1").response)
    store.release("resp_1")
    assert await store.get("resp_1", "") == begun_response(stored_response("resp_1"))
    assert await other.runner("resp_1") == Server(other.server_id, "", is_alive=True)
    failed = stored_response("resp_1", status="failed", output=())
    await other.end(failed, Block(1, 1, b"end"))
    store.append("resp_1", Block(1, 1, b"b"))
    await store.end(stored_response("resp_1"), Block(2, 1, b"c"))
    assert await store.get("resp_1", "") == failed
    assert await other.blocks("resp_1") == (Block(0, 1, b"a"), Block(1, 1, b"end"))
    assert await store.items(["msg_resp_1"], "") == {}


async def test_restarted_response_is_queued_without_events(store: Store, other: Store) -> None:
    await accept(store)
    store.start(begun_response(stored_response("resp_1", ITEMS[0], background=True)).response)
    store.append("resp_1", Block(0, 3, b"abc"))
    await store.writer.flushed()
    await other.restart("resp_1")
    assert await other.blocks("resp_1") == (Block(0, 3, b"abc"),)
    (orphan,) = await other.orphans()
    assert await other.claim(orphan)
    await other.restart("resp_1")
    again = await other.get("resp_1", "")
    assert again is not None
    assert again.response.status == "queued"
    assert await other.blocks("resp_1") == ()
    assert await other.queued("resp_1") == request_of(queued_response("resp_1", ITEMS[0]))


async def test_released_response_is_an_orphan(store: Store, other: Store) -> None:
    await store.servers.join("http://one")
    await accept(store)
    store.release("resp_1")
    await store.writer.flushed()
    assert await other.orphans() == (Orphan(queued_response("resp_1", ITEMS[0]), None, is_background=True),)
    (orphan,) = await store.orphans()
    assert await store.claim(orphan)


@pytest.mark.parametrize("column", ["response = '[]'", "input = '{'", "tokens = substr(tokens, 1, 0)"])
async def test_damaged_orphan_does_not_block_others(store: Store, other: Store, column: str) -> None:
    for name in ("resp_1", "resp_2"):
        store.begin(begun_response(stored_response(name)))
    await execute_sql(store, f"update responses set {column} where id = 'resp_1'")
    assert [orphan.stored.response.id for orphan in await other.orphans()] == ["resp_2"]
