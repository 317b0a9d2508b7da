"""Several servers over one store: who runs what, and what becomes of it when one of them dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from msgspec.structs import replace

from pipeline.errors import RunInterrupted, StoreFailed
from pipeline.frames import Origin
from pipeline.protocol.tools import McpServer, Toolset
from pipeline.secret import Secret
from stages.persist.database import Unavailable, Unit
from stages.persist.log import Block
from stages.persist.store import Orphan, Server, Store
from tests.support.databases import database, opened
from tests.support.faulty_database import Faulty
from tests.support.stored_responses import ITEMS, begun, damage, keep, queued, request, stop_hearts, stored


@pytest.fixture
async def other(store_at: str) -> AsyncIterator[Store]:
    """A second server over the same store."""
    async with opened(store_at) as store:
        yield store


async def accept(store: Store, response_id: str = "resp_1") -> None:
    """Have the store take a background response."""
    waiting = queued(response_id, ITEMS[0])
    await store.accept(waiting, request(waiting))


async def test_what_is_accepted_is_durable_with_its_request(store: Store, other: Store) -> None:
    """Behind the answer that says queued, any server finds the response and all that it takes to run it."""
    await accept(store)
    assert await other.get("resp_1", "") == queued("resp_1", ITEMS[0])
    assert await store.queued("resp_1") == request(queued("resp_1", ITEMS[0]))


class Speechless(Faulty):
    """A database that carries everything out, and may lose its connection before it says so."""

    is_speechless = False

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        counts = await super().write(units)
        if self.is_speechless:
            raise Unavailable("The connection is lost.")
        return counts


async def test_what_was_perhaps_accepted_is_taken_back(store_at: str) -> None:
    """Whoever was told that a response could not be stored finds none, and nobody ever runs it."""
    kept = Speechless(database(store_at))
    store = Store(kept)
    await store.open()
    kept.is_speechless = True
    with pytest.raises(StoreFailed):
        await accept(store)
    kept.is_speechless = False
    assert await store.get("resp_1", "") is None
    assert await store.items([ITEMS[0].id], "") == {}
    await store.close()


async def test_what_another_server_has_taken_over_is_not_run(store: Store, other: Store) -> None:
    """A server that was silent for too long finds nothing to run in what waited for it."""
    await accept(store)
    await stop_hearts(store)
    (orphan,) = await other.orphans()
    assert await other.claim(orphan)
    assert await store.queued("resp_1") is None
    assert await other.queued("resp_1") is not None


async def test_a_request_that_is_no_unicode_is_accepted(store: Store) -> None:
    """Half a surrogate pair in a request survives until the response is run."""
    waiting = queued("resp_1", instructions="\ud800")
    await store.accept(waiting, request(waiting))
    assert await store.queued("resp_1") == request(waiting)


async def test_a_background_response_goes_from_queued_to_its_end(store: Store) -> None:
    """Its request is kept until the end, which leaves nothing but the response and its events."""
    await accept(store)
    done = replace(stored("resp_1", ITEMS[0], background=True), tokens={"msg_resp_1": (5,)})
    store.start(begun(done).response)
    store.append("resp_1", Block(0, 3, b"abc"))
    assert await store.get("resp_1", "") == begun(done)
    assert await store.queued("resp_1") is not None
    await store.end(done, None)
    assert await store.get("resp_1", "") == done
    assert await store.queued("resp_1") is None
    assert await store.blocks("resp_1") == (Block(0, 3, b"abc"),)


@pytest.mark.parametrize("text", ["Be brief.", "half a pair \ud800, NUL \0"])
async def test_a_request_is_kept_without_its_secrets(store: Store, text: str) -> None:
    """Whatever its text is, all of it comes back but the headers, which are nowhere in the store."""
    server = McpServer("maps", "https://maps.example/mcp", Secret({"Authorization": "Bearer canary"}))
    waiting = queued("resp_1", ITEMS[0], instructions=text)
    asked = replace(request(waiting), tools=Toolset(servers=(server,)), results={"ci_1": text})
    await store.accept(waiting, asked)
    kept = await store.queued("resp_1")
    assert kept is not None
    assert kept == asked
    assert kept.tools.servers[0].headers.reveal() == {}
    ((row,),) = await store._ledger.read("select request from responses")
    assert "maps.example" in row
    assert "canary" not in row


async def test_a_request_of_another_version_interrupts_the_run(store: Store) -> None:
    """A request that this server cannot understand ends its response, and not the server."""
    await accept(store)
    await damage(store, "update responses set request = '{}'")
    with pytest.raises(RunInterrupted):
        await store.queued("resp_1")


async def test_the_runner_of_a_response_is_known(store: Store, other: Store) -> None:
    """Every server knows which one has a response that is not over, where it is and whether it is alive."""
    await store.servers.join("http://one")
    store.begin(begun(stored("resp_1")))
    await accept(store, "resp_2")
    for response_id in ("resp_1", "resp_2"):
        assert await other.runner(response_id) == Server(store.server_id, "http://one", is_alive=True)
    await stop_hearts(store)
    assert await other.runner("resp_1") == Server(store.server_id, "http://one", is_alive=False)
    await store.servers.beat()
    assert await other.runner("resp_1") == Server(store.server_id, "http://one", is_alive=True)
    await store.end(stored("resp_1"), None)
    assert await other.runner("resp_1") is None
    store.release("resp_2")
    assert await store.get("resp_2", "")
    assert await other.runner("resp_2") is None


async def test_a_server_knows_whether_it_was_silent(store: Store) -> None:
    """A beat says whether the one before was lately, by the clock that the others go by."""
    await store.servers.join("http://one")
    assert await store.servers.beat()
    await stop_hearts(store)
    assert not await store.servers.beat()
    assert await store.servers.beat()
    await store.servers.leave()
    assert not await store.servers.beat()


async def test_a_live_server_has_no_orphans(store: Store, other: Store) -> None:
    """What a server runs or is going to run is nobody else's as long as it beats, and never its own orphan."""
    await store.servers.join("http://one")
    store.begin(begun(stored("resp_1")))
    await accept(store, "resp_2")
    await keep(store, stored("resp_3"))
    assert await other.orphans() == ()
    await store.servers.leave()
    assert await store.orphans() == ()
    assert len(await other.orphans()) == 2


async def test_the_responses_of_a_dead_server_are_orphans(store: Store, other: Store) -> None:
    """When a server's heart has stopped, whatever it had not ended is found, oldest first, with its owner."""
    await store.servers.join("http://one")
    foreground = replace(begun(stored("resp_1")), origin=Origin("ann"))
    store.begin(foreground)
    background = queued("resp_2")
    await store.accept(background, request(background))
    await keep(store, stored("resp_3"))
    await stop_hearts(store)
    assert await other.orphans() == (
        Orphan(foreground, store.server_id, is_background=False),
        Orphan(background, store.server_id, is_background=True),
    )


async def test_a_server_that_comes_back_replaces_the_one_it_was(store: Store, other: Store) -> None:
    """Whoever joins under an address has taken it from a dead server, whose runs are orphans at once."""
    await store.servers.join("http://one")
    store.begin(begun(stored("resp_1")))
    await store._writer.settled()
    await other.servers.join("http://two")
    assert await other.orphans() == ()
    await other.servers.join("http://one")
    (orphan,) = await other.orphans()
    assert orphan.server_id == store.server_id


async def test_an_address_is_not_taken_from_a_server_of_another_machine(store: Store, other: Store) -> None:
    """Each machine has a 127.0.0.1 of its own: a server under the same address elsewhere lives on."""
    await store.servers.join("http://127.0.0.1:8000")
    store.begin(begun(stored("resp_1")))
    await store._writer.settled()
    other.servers.machine = "another"
    await other.servers.join("http://127.0.0.1:8000")
    assert await other.orphans() == ()


async def test_one_server_wins_an_orphan(store: Store, store_at: str) -> None:
    """Of many servers that settle at once, each orphan goes to exactly one."""
    for number in range(4):
        store.begin(begun(stored(f"resp_{number}")))
    await store._writer.settled()
    async with opened(store_at) as one, opened(store_at) as two, opened(store_at) as three:
        others = (one, two, three)
        found = await asyncio.gather(*(each.orphans() for each in others))
        claims = [(each, orphan) for each, orphans in zip(others, found, strict=True) for orphan in orphans]
        won = await asyncio.gather(*(each.claim(orphan) for each, orphan in claims))
    assert len(won) == 12
    assert sorted(o.stored.response.id for (_, o), is_won in zip(claims, won, strict=True) if is_won) == [
        f"resp_{number}" for number in range(4)
    ]


async def test_a_server_that_lives_again_keeps_its_runs(store: Store, other: Store) -> None:
    """An orphan whose server beat in the meantime is not claimed."""
    await store.servers.join("http://one")
    store.begin(begun(stored("resp_1")))
    await store._writer.settled()
    await stop_hearts(store)
    (orphan,) = await other.orphans()
    await store.servers.beat()
    assert not await other.claim(orphan)


async def test_a_server_taken_for_dead_overwrites_nothing(store: Store, other: Store) -> None:
    """Once a run was claimed, nothing that its first server still has to say of it is kept."""
    store.begin(begun(stored("resp_1")))
    store.append("resp_1", Block(0, 1, b"a"))
    await store._writer.settled()
    (orphan,) = await other.orphans()
    assert await other.claim(orphan)
    store.start(stored("resp_1").response)
    store.release("resp_1")
    assert await store.get("resp_1", "") == begun(stored("resp_1"))
    assert await other.runner("resp_1") == Server(other.server_id, "", is_alive=True)
    failed = stored("resp_1", status="failed", output=())
    await other.end(failed, Block(1, 1, b"end"))
    store.append("resp_1", Block(1, 1, b"b"))
    await store.end(stored("resp_1"), Block(2, 1, b"c"))
    assert await store.get("resp_1", "") == failed
    assert await other.blocks("resp_1") == (Block(0, 1, b"a"), Block(1, 1, b"end"))
    assert await store.items(["msg_resp_1"], "") == {}


async def test_a_restarted_response_waits_without_events(store: Store, other: Store) -> None:
    """What is made again begins as if it never had: queued, its request kept, its events gone."""
    await accept(store)
    store.start(begun(stored("resp_1", ITEMS[0], background=True)).response)
    store.append("resp_1", Block(0, 3, b"abc"))
    await store._writer.settled()
    await other.restart("resp_1")
    assert await other.blocks("resp_1") == (Block(0, 3, b"abc"),)
    (orphan,) = await other.orphans()
    assert await other.claim(orphan)
    await other.restart("resp_1")
    again = await other.get("resp_1", "")
    assert again is not None
    assert again.response.status == "queued"
    assert await other.blocks("resp_1") == ()
    assert await other.queued("resp_1") == request(queued("resp_1", ITEMS[0]))


async def test_what_is_released_is_anybodys(store: Store, other: Store) -> None:
    """A response that its server gives back is an orphan at once, also while that server lives."""
    await store.servers.join("http://one")
    await accept(store)
    store.release("resp_1")
    await store._writer.settled()
    assert await other.orphans() == (Orphan(queued("resp_1", ITEMS[0]), None, is_background=True),)
    (orphan,) = await store.orphans()
    assert await store.claim(orphan)


@pytest.mark.parametrize("column", ["response = '[]'", "input = '{'", "tokens = substr(tokens, 1, 0)"])
async def test_an_orphan_that_cannot_be_read_keeps_no_other_from_its_end(
    store: Store, other: Store, column: str
) -> None:
    """One damaged row is logged, and the orphans beside it are settled."""
    for name in ("resp_1", "resp_2"):
        store.begin(begun(stored(name)))
    await damage(store, f"update responses set {column} where id = 'resp_1'")
    assert [orphan.stored.response.id for orphan in await other.orphans()] == ["resp_2"]
