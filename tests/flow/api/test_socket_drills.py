"""Fault drills on sockets: broken frames, floods, clients that leave at any point, and many connections.

After each drill nothing runs, no task is left, and the server answers the next request.
"""

from __future__ import annotations

import asyncio
import json
import signal
import struct
import tracemalloc
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.api.http.held_bytes import SMALL
from penstock.api.socket import incoming as incoming_module
from penstock.api.socket.connection import MOST_WAITING
from penstock.pipeline.logs import without_foreign_texts
from penstock.pipeline.protocol.events import TERMINAL_TYPES
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import PATIENCE, wait_until
from tests.support.event_streams import final
from tests.support.server import CALL, HELLO, WEATHER, PacedEngine, PacedServer, ScriptedServer, running_server, script
from tests.support.server_process import running_process
from tests.support.socket_client import IMPATIENT, SocketClient, connected
from tests.support.socket_frames import COMPRESSED, NO_MASK, deflated, frame_of, upgraded

CREATE: dict[str, Any] = {"type": "response.create", "input": "Hi", "tools": [WEATHER]}
SHORT = "<|channel|>final<|message|>Hi.<|return|>"
TALK = HELLO.removesuffix("<|return|>") + "<|end|><|start|>assistant" + CALL


@asynccontextmanager
async def drill(served: ScriptedServer | PacedServer) -> AsyncGenerator[None, None]:
    """Check after a drill that nothing new is still running, and that the server answers."""
    await served.post({"input": "Hi"})
    before = len(asyncio.all_tasks())
    yield
    await wait_until(lambda: not served.engine.running and len(asyncio.all_tasks()) <= before)
    assert not served.api.sockets.connections
    async with connected(served) as client:
        assert (await client.create(input="Hi")).status == "completed"


@pytest.fixture
async def talking(tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script(TALK)), tmp_path) as served:
        yield served


CLOSED = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)

WHOLE = frame_of(json.dumps(CREATE).encode())

BROKEN = {
    "half a head": WHOLE[:3],
    "half a frame": WHOLE[:40],
    "half a message": frame_of(json.dumps(CREATE).encode()[:20], fin=False),
    "a frame without a mask": frame_of(json.dumps(CREATE).encode(), mask=NO_MASK),
    "an unknown opcode": frame_of(b"{}", opcode=5),
    "a continuation of nothing": frame_of(b"{}", opcode=0),
    "a long ping": frame_of(b"x" * 200, opcode=9),
    "no frames at all": b"\xff" * 200,
    "text that is not UTF-8": frame_of(b'{"type": "response.create", "input": "\xff"}'),
    "a whole request and half of the next": WHOLE + WHOLE[:40],
}


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN.keys())
async def test_broken_frames_harm_only_their_connection(talking: ScriptedServer, sent: bytes) -> None:
    async with drill(talking):
        _, writer = await upgraded(talking.url)
        writer.write(sent)
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.close()


LARGE = 3 * SMALL
"""The largest message in the drills on what is still arriving."""

ARRIVED = 2 * SMALL + 1
PART = b"\x81\xff" + struct.pack(">Q", LARGE - 1) + b"\0\0\0\0" + b" " * ARRIVED
"""A frame of almost the largest size, and two thirds of its bytes."""


@asynccontextmanager
async def arriving(served: ScriptedServer, sent: bytes, **headers: str) -> AsyncGenerator[asyncio.StreamReader, None]:
    """Send bytes over a connection of their own, which stays open for the length of the block."""
    reader, writer = await upgraded(served.url, **headers)
    writer.write(sent)
    with suppress(ConnectionResetError):
        await writer.drain()
    yield reader
    writer.close()
    with suppress(ConnectionResetError):
        await writer.wait_closed()


async def closed_with(reader: asyncio.StreamReader) -> int:
    """Return the code with which the server closes a connection."""
    head, _, code = struct.unpack(">BBH", await asyncio.wait_for(reader.readexactly(4), PATIENCE))
    assert head == 0x88
    return int(code)


async def test_messages_that_arrive_are_held_within_the_bound_of_bodies(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(script(TALK)), tmp_path, max_body_bytes=LARGE) as served:
        async with drill(served), AsyncExitStack() as closing:
            readers = [await closing.enter_async_context(arriving(served, PART)) for _ in range(5)]
            held = served.api.held
            await wait_until(lambda: held.count == 5 * ARRIVED)
            last = await closing.enter_async_context(arriving(served, PART))
            assert await closed_with(last) == aiohttp.WSCloseCode.TRY_AGAIN_LATER
            assert not any(reader.at_eof() for reader in readers)
        await wait_until(lambda: held.count == 0)


async def test_message_that_stops_arriving_closes_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming_module, "SECONDS", 0.1)
    async with (
        running_server(ScriptedEngine(script(TALK)), tmp_path, max_body_bytes=LARGE) as served,
        drill(served),
        arriving(served, PART) as reader,
    ):
        held = served.api.held
        assert await closed_with(reader) == aiohttp.WSCloseCode.POLICY_VIOLATION
        await wait_until(lambda: held.count == 0)


async def test_large_message_is_held_only_until_its_request_was_read(tmp_path: Path) -> None:
    async with (
        running_server(ScriptedEngine(script(TALK)), tmp_path, max_body_bytes=LARGE) as served,
        connected(served) as client,
    ):
        for _ in range(3):
            await client.socket.send_str(" " * (2 * SMALL) + json.dumps(CREATE))
            assert final(await client.stream()).status == "completed"
            assert served.api.held.count == 0


async def test_large_message_is_not_kept_while_its_response_runs(tmp_path: Path) -> None:
    async with (
        running_server(PacedEngine(script(TALK)), tmp_path, max_body_bytes=LARGE) as served,
        connected(served) as client,
    ):
        await client.create(input="Hi")
        served.engine.hold()
        tracemalloc.start()
        try:
            text = " " * (2 * SMALL) + json.dumps(CREATE)
            before, _ = tracemalloc.get_traced_memory()
            await client.socket.send_str(text)
            await wait_until(lambda: served.engine.running == 1)
            await asyncio.sleep(0)
            now, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert now - before < SMALL
        served.engine.say_all()
        await client.stream()


@pytest.mark.parametrize("payload", [WHOLE, b" " * 30_000_000], ids=["a request", "a bomb"])
@pytest.mark.parametrize("offer", ["permessage-deflate", "permessage-deflate; client_max_window_bits", "x"])
async def test_compressed_frame_is_refused_unread(talking: ScriptedServer, payload: bytes, offer: str) -> None:
    frame = frame_of(deflated(payload), reserved=COMPRESSED)
    async with drill(talking), arriving(talking, frame, Extensions=offer) as reader:
        assert await closed_with(reader) == aiohttp.WSCloseCode.PROTOCOL_ERROR


async def test_log_tells_why_a_connection_was_closed(talking: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with arriving(talking, BROKEN["an unknown opcode"]) as reader:
        assert await closed_with(reader) == aiohttp.WSCloseCode.PROTOCOL_ERROR
    await wait_until(lambda: not talking.api.sockets.connections)
    assert all(map(without_foreign_texts, caplog.records))  # as the log of a command names errors
    lines = [record.getMessage() for record in caplog.records]
    assert any("its frames cannot be taken: The frame is wrong: opcode 5 is unknown." in line for line in lines)
    assert not any("WebSocket /v1/responses: 400" in line for line in lines)


async def test_request_with_a_close_right_after_it_is_not_held(served: PacedServer) -> None:
    async with drill(served):
        _, writer = await upgraded(served.url)
        await wait_until(lambda: len(served.api.sockets.connections) == 1)
        writer.write(WHOLE + frame_of(b"", opcode=8))  # one segment: the response is cancelled before its first step
        await wait_until(lambda: not served.api.sockets.connections)
        await wait_until(lambda: served.api.held.count == 0)
        writer.close()


async def test_client_may_leave_after_any_event(talking: ScriptedServer) -> None:
    async with drill(talking):
        async with connected(talking) as client:
            await client.send(**CREATE)
            count = len(await client.stream())
        for left_after in range(count):
            for is_clean in (False, True):
                async with connected(talking) as client:
                    await client.send(**CREATE)
                    for _ in range(left_after):
                        await client.frame()
                    if not is_clean:
                        connection: Any = client.socket._response.connection
                        connection.transport.abort()  # without a frame that closes


async def test_flood_of_requests_waits_at_the_client(served: PacedServer) -> None:
    served.engine.script = script(SHORT)
    served.engine.hold()
    async with connected(served) as client:
        await client.send(**CREATE)
        await wait_until(lambda: served.engine.running == 1)
        connection: Any
        (connection,) = served.api.sockets.connections
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send_all([client.send(**CREATE) for _ in range(500)]))
            await wait_until(lambda: connection._lanes.waiting == MOST_WAITING)
            await asyncio.sleep(0.1)
            assert connection._lanes.waiting == MOST_WAITING
            served.engine.say_all()
            for _ in range(501):
                assert await next_end(client) == "response.completed"


async def next_end(client: SocketClient) -> str:
    """Return the type of the event that ends the next response; in a flood, no event before it is checked."""
    while (kind := (await client.frame())["type"]) not in TERMINAL_TYPES:
        pass
    return str(kind)


async def send_all(sending: list[Any]) -> None:
    for each in sending:
        await each


async def test_flood_of_wrong_events_is_answered_one_by_one(served: PacedServer) -> None:
    async with drill(served), connected(served) as client:
        for _ in range(1000):
            await client.socket.send_str("{}")
        for _ in range(1000):
            assert (await client.error())["status"] == 400


async def test_client_that_leaves_in_a_flood_leaves_nothing(served: PacedServer) -> None:
    async with drill(served):
        served.engine.hold()
        async with connected(served, timeout=IMPATIENT) as client:
            for number in range(200):
                await client.send(lane=f"lane{number % 32}", **CREATE)
            await wait_until(lambda: served.engine.running == 16)
        await served.wait_until_idle()
        served.engine.say_all()


async def test_many_idle_connections_leave_room_for_active_ones(served: PacedServer) -> None:
    served.engine.script = script(SHORT)
    async with drill(served), AsyncExitStack() as closing:
        pool = await closing.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        served.client, mine = pool, served.client
        clients = [await closing.enter_async_context(connected(served)) for _ in range(600)]
        served.client = mine
        active = clients[::6]
        for turn in range(3):
            await asyncio.gather(*(client.send(input=f"Hi {turn}", store=False) for client in active))
            assert set(await asyncio.gather(*map(next_end, active))) == {"response.completed"}


async def test_signal_that_stops_the_server_is_seen_by_every_lane(served: PacedServer) -> None:
    served.engine.hold(1)
    async with connected(served) as client:
        for lane in ("a", "b", "a"):
            await client.send(lane=lane, **CREATE)
        await wait_until(lambda: served.engine.running == 2)
        await served.scheduler.drain(0)
        for lane in ("a", "b"):
            assert final(await client.stream(lane)).status == "failed"
        assert (await client.error("a"))["status"] == 503


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_process_that_ends_leaves_no_response_without_an_end(
    store_at: str, tmp_path: Path, number: signal.Signals
) -> None:
    async with running_process(store_at, tmp_path, "long", "--drain-timeout", "0") as server:
        async with connected(server) as client:
            for lane in ("a", "b"):
                await client.send(lane=lane, **CREATE)
            names = [(await client.frame(lane))["response"]["id"] for lane in ("a", "b")]
            await server.kill(number)
            while (await client.socket.receive(timeout=PATIENCE)).type not in CLOSED:
                pass
        await server.start()
        for name in names:
            response = await server.wait_for_end(name)
            assert response["status"] == "failed"
            assert response["error"]["code"] == "server_error"
        async with connected(server) as client:
            await client.send(input="Hi", previous_response_id=names[0])
            assert (await client.error())["error"]["code"] == "previous_response_unfinished"
