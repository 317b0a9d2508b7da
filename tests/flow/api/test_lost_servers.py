"""Servers of one store that disconnect, are unreachable, fall silent or die: no reader waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest
from aiohttp import web

from penstock.api.http.auth import Keys
from penstock.api.peers import FORWARDED, Peers
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.store.store import Store
from tests.support import api_clients
from tests.support.event_streams import final, read_sse
from tests.support.server import COUNT, ENDLESS, PacedEngine, running_server, script
from tests.support.stored_responses import expire_heartbeat, expire_heartbeats, living_servers
from tests.support.stores import FaultyDatabase, database_at, open_store
from tests.support.tool_servers import web_server

NEVER = 1000.0
NOWHERE = "http://127.0.0.1:9"
"""An address at which no server listens."""


def counting(initial: int = 30) -> PacedEngine:
    return PacedEngine(script(COUNT), initial=initial)


def endless() -> ScriptedEngine:
    return ScriptedEngine(script(ENDLESS, endless=True, latency=0.01))


def quick() -> ScriptedEngine:
    return ScriptedEngine(script())


def stream_of(response_id: str) -> str:
    return f"/v1/responses/{response_id}?stream=true"


@dataclass
class Way:
    """A proxy to a server that breaks each connection after ``size`` bytes."""

    client: aiohttp.ClientSession
    size: int
    url: str = ""
    target: str = ""
    connections: int = 0
    cuts: int = 0

    async def hand_on(self, request: web.Request) -> web.StreamResponse:
        """Forward a request to the server, and pass on the answer until the connection breaks."""
        url, headers = self.target + request.path_qs, {FORWARDED: request.headers[FORWARDED]}
        async with self.client.request(request.method, url, headers=headers) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            left = self.size
            self.connections += 1
            async for piece in answer.content.iter_any():
                await response.write(piece[:left])
                left -= len(piece)
                if left <= 0:
                    self.cuts += 1
                    raise ConnectionResetError
            return response


@asynccontextmanager
async def cutting(size: int) -> AsyncGenerator[Way, None]:
    async with aiohttp.ClientSession() as client:
        way = Way(client, size)
        async with web_server(way.hand_on) as way.url:
            yield way


@pytest.mark.defect("39")
async def test_broken_connection_between_servers_is_resumed(store_at: str) -> None:
    async with (
        cutting(4_000) as way,
        running_server(counting(), store_at, url=way.url) as one,
        running_server(quick(), store_at) as other,
    ):
        way.target = one.url
        response_id = await one.start_background()
        reading = asyncio.create_task(other.replay(response_id))
        async with asyncio.timeout(120):
            while way.cuts < 2:
                if way.connections > way.cuts:
                    one.engine.say(1)
                await asyncio.sleep(0.002)
        one.engine.say_all()
        stream = await reading
        assert final(read_sse(stream)).status == "completed"
        assert api_clients.sse_frames(stream) == api_clients.sse_frames(await one.replay(response_id))


@pytest.mark.defect("V3")
async def test_unreachable_server_blocks_no_reader(store_at: str) -> None:
    async with (
        running_server(counting(), store_at, url=NOWHERE) as one,
        running_server(quick(), store_at, peers=Peers(patience=0.1)) as other,
    ):
        response_id = await one.start_background()
        stream = asyncio.create_task(other.replay(response_id))
        status, error = await other.cancel(response_id)
        assert (status, error["error"]["type"]) == (503, "server_error")
        assert (await other.get_response(response_id))["status"] in ("queued", "in_progress")
        one.engine.say_all()
        assert api_clients.sse_frames(await stream) == api_clients.sse_frames(await one.replay(response_id))


@pytest.mark.defect("V3")
async def test_mute_server_blocks_no_reader(store_at: str) -> None:
    async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    held: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    host, port = silent.sockets[0].getsockname()
    async with (
        running_server(counting(), store_at, url=f"http://{host}:{port}") as one,
        running_server(quick(), store_at, peers=Peers(silence=0.2)) as other,
    ):
        response_id = await one.start_background()
        reading = asyncio.create_task(other.replay(response_id))
        await api_clients.wait_until(lambda: held)
        one.engine.say_all()
        assert final(read_sse(await reading)).status == "completed"
    for writer in held:
        writer.close()
    silent.close()


@pytest.mark.defect("V21")
async def test_key_is_passed_to_the_other_server(store_at: str) -> None:
    """Through another server, a response still belongs to its owner only."""
    keys = Keys(given=["sk-alice-0123456789", "sk-bob-0123456789ab"])
    alice, bob = ({"Authorization": f"Bearer {key}"} for key in ("sk-alice-0123456789", "sk-bob-0123456789ab"))
    async with (
        running_server(endless(), store_at, keys=keys) as one,
        running_server(quick(), store_at, keys=keys) as other,
        aiohttp.ClientSession(headers=alice) as client,
    ):
        one.client.headers.update(alice)
        response_id = await one.start_background()
        async with client.get(other.url + stream_of(response_id)) as answer:
            await api_clients.StreamReader(answer).upto(b"output_text.delta")
        for method, path in (("GET", "?stream=true"), ("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
            url = f"{other.url}/v1/responses/{response_id}{path}"
            async with client.request(method, url, headers=bob) as answer:
                assert answer.status == 404
        async with client.post(f"{other.url}/v1/responses/{response_id}/cancel") as answer:
            assert (await answer.json())["status"] == "cancelled"


async def test_silent_server_cannot_overwrite_settled_responses(store_at: str) -> None:
    async with (
        running_server(counting(), store_at, heartbeat=NEVER) as one,
        running_server(quick(), store_at, heartbeat=0.05) as other,
    ):
        response_id = await one.start_background()
        await stored_as_running(other.store, response_id)
        await expire_heartbeat(other.store, one.url)
        answer = await other.wait_for_end(response_id)
        assert (answer["status"], answer["error"]["code"]) == ("failed", "server_error")
        stream = await other.replay(response_id)
        assert final(read_sse(stream)).status == "failed"
        one.engine.say_all()
        await api_clients.wait_until(lambda: len(one.scheduler.runs) == 0)
        for served in (one, other):
            assert await served.get_response(response_id) == answer
            assert await served.replay(response_id) == stream


async def test_server_that_was_silent_releases_its_responses(store_at: str) -> None:
    silenced = FaultyDatabase(database_at(store_at))
    async with (
        running_server(endless(), silenced, limit=1, heartbeat=0.05) as one,
        running_server(quick(), store_at, heartbeat=0.05) as other,
    ):
        running, waiting = await one.start_background(), await one.start_background()
        async with one.client.get(one.url + stream_of(running)) as answer:
            await stored_as_running(other.store, running)
            silenced.is_down = True
            await expire_heartbeat(other.store, one.url)
            assert (await other.wait_for_end(waiting))["output"][-1]["content"][0]["text"] == "Hello!"
            assert (await other.wait_for_end(running))["status"] == "failed"
            silenced.is_down = False
            with pytest.raises(aiohttp.ClientError):
                await api_clients.StreamReader(answer).rest()
        await api_clients.wait_until(lambda: one.engine.running == 0)
        assert final(read_sse(await one.replay(running))).status == "failed"


async def stored_as_running(store: Store, response_id: str) -> None:
    """Wait until the store says that a response runs: of a dead server it ends then, and begins again before."""
    async with asyncio.timeout(120):
        while (found := await store.get(response_id, "")) is None or found.response.status != "in_progress":
            await asyncio.sleep(0.02)


async def wait_for_heartbeats(store: Store, count: int) -> None:
    """Wait until that many servers have sent a heartbeat since all of them looked dead."""
    async with asyncio.timeout(120):
        while await living_servers(store) < count:
            await asyncio.sleep(0.02)


async def test_store_outage_settles_no_server(store_at: str) -> None:
    """After an outage the first server waits for the others before it takes them for dead."""
    near, far = (FaultyDatabase(database_at(store_at)) for _ in range(2))
    async with (
        running_server(endless(), far, heartbeat=0.1) as one,
        running_server(quick(), near, heartbeat=0.1) as other,
    ):
        response_id = await one.start_background()
        await api_clients.wait_until(lambda: one.engine.running == 1)
        near.is_down = far.is_down = True
        async with open_store(store_at) as store:
            await expire_heartbeats(store)
            near.is_down = False
            await wait_for_heartbeats(store, 1)
            await asyncio.sleep(0.3)  # it looks at the others, three times
            far.is_down = False
            await wait_for_heartbeats(store, 2)
        assert one.engine.running == 1
        assert (await other.get_response(response_id))["status"] == "in_progress"


async def test_clock_jump_settles_no_server(store_at: str) -> None:
    """If all servers look dead at once, as after a suspend, the first with a new heartbeat waits for the others."""
    async with (
        running_server(endless(), store_at, heartbeat=0.4) as one,
        running_server(quick(), store_at, heartbeat=0.05) as other,
    ):
        response_id = await one.start_background()
        await api_clients.wait_until(lambda: one.engine.running == 1)
        await expire_heartbeats(other.store)
        await wait_for_heartbeats(other.store, 2)
        assert one.engine.running == 1
        assert (await other.get_response(response_id))["status"] == "in_progress"


async def test_clock_jump_settles_no_server_though_one_was_looking(
    store_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search for dead servers that began before a jump of the clock goes on after it."""
    async with (
        running_server(endless(), store_at, heartbeat=NEVER) as one,
        running_server(quick(), store_at, heartbeat=0.02) as other,
    ):
        response_id = await one.start_background()
        await api_clients.wait_until(lambda: one.engine.running == 1)
        looking, may_look = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            looking.set()
            await may_look.wait()

        monkeypatch.setattr(other.store, "recover_parts", wait)
        await looking.wait()
        await expire_heartbeats(other.store)
        await asyncio.sleep(0.3)  # in which a server that does not wait for it has a heartbeat
        may_look.set()
        await wait_for_heartbeats(other.store, 1)
        await asyncio.sleep(0.1)
        assert (await other.get_response(response_id))["status"] == "in_progress"
