"""The cache of listings."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from penstock.extensions.tools.mcp.failures import McpFailure
from penstock.extensions.tools.mcp.listings import Key, Listing, Listings
from penstock.pipeline.protocol.items import ListedTool

KEY: Key = ("server", b"")


@dataclass
class CountingServer:
    """A server that counts its listings, and answers when the test lets it."""

    times: int = 0
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    async def __call__(self) -> Listing:
        self.times += 1
        await self.may_answer.wait()
        if self.error:
            raise self.error
        return Listing((ListedTool(f"tool_{self.times}", {}),))


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server() -> CountingServer:
    server = CountingServer()
    server.may_answer.set()
    return server


async def test_fresh_listing_is_reused(server: CountingServer) -> None:
    clock = Clock()
    listings = Listings(60.0, clock=clock)
    first = await listings.get(KEY, server)
    clock.now += 59
    assert await listings.get(KEY, server) is first
    clock.now += 1
    assert listings.known(KEY) is None
    assert await listings.get(KEY, server) != first
    assert server.times == 2


async def test_concurrent_requests_share_one_fetch() -> None:
    server = CountingServer()
    listings = Listings(60.0)
    waiting = [asyncio.create_task(listings.get(KEY, server)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    server.may_answer.set()
    assert len({id(tools) for tools in await asyncio.gather(*waiting[1:])}) == 1
    assert server.times == 1
    assert waiting[0].cancelled()


async def test_errors_reach_all_waiters_and_are_not_cached(server: CountingServer) -> None:
    listings = Listings(60.0)
    server.error = LookupError("down")
    received = await asyncio.gather(*(listings.get(KEY, server) for _ in range(2)), return_exceptions=True)
    assert received == [server.error] * 2
    server.error = None
    assert (await listings.get(KEY, server)).tools
    assert server.times == 2


async def test_listing_from_before_a_change_is_not_cached() -> None:
    server = CountingServer()
    listings = Listings(60.0)
    waiting = asyncio.create_task(listings.get(KEY, server))
    await asyncio.sleep(0)
    listings.forget(KEY)
    server.may_answer.set()
    assert (await waiting).tools[0].name == "tool_1"
    assert (await listings.get(KEY, server)).tools[0].name == "tool_2"
    listings.forget(KEY)
    assert listings.known(KEY) is None


async def test_only_the_latest_listings_are_kept(server: CountingServer) -> None:
    listings = Listings(60.0, most=3)
    for n in range(5):
        await listings.get((f"server {n}", b""), server)
    assert [n for n in range(5) if listings.known((f"server {n}", b""))] == [2, 3, 4]


async def test_closing_ends_pending_fetches() -> None:
    listings = Listings(60.0)
    waiting = asyncio.create_task(listings.get(KEY, CountingServer()))
    await asyncio.sleep(0)
    await listings.close()
    with pytest.raises(McpFailure, match="request to the server was cancelled"):
        await waiting
