"""What of a stream goes out together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from unittest.mock import create_autospec

import pytest
from aiohttp import web
from aiohttp.http_writer import StreamWriter
from aiohttp.test_utils import make_mocked_request

from penstock.api.http.sse import _WAITING, LONG_FRAME, EventStream, await_events, send
from penstock.api.http.wire import Wire
from penstock.pipeline.tasks import cancelled


def unfolded(_: Any) -> Any:
    raise NotImplementedError


WIRE = Wire(encode=bytes, fold=unfolded)


class Client:
    """A client, and the stream of its answer."""

    def __init__(self) -> None:
        self.writer = create_autospec(StreamWriter, instance=True)
        self.protocol = create_autospec(web.RequestHandler, instance=True, writing_paused=False)
        self.transport = create_autospec(asyncio.Transport, instance=True)
        self.transport.is_closing.return_value = False
        request = make_mocked_request("POST", "/", writer=self.writer, protocol=self.protocol, transport=self.transport)
        self.request = request
        self.stream = EventStream(request, WIRE, 60)

    @property
    def packets(self) -> list[bytes]:
        return [call.args[0] for call in self.writer.write.await_args_list]


async def answered() -> Client:
    """A client whose stream has begun in this turn of the loop."""
    client = Client()
    await client.stream.begin()
    return client


async def test_headers_go_out_with_the_first_events_of_a_turn_of_the_loop() -> None:
    client = await answered()
    await client.stream.write(b"one")
    await client.stream.write(b"two")
    assert not client.packets
    assert not client.writer.send_headers.called
    await asyncio.sleep(0)
    await client.stream.write(b"three")
    await asyncio.sleep(0)
    assert client.packets == [b"onetwo", b"three"]


async def test_headers_wait_for_no_event() -> None:
    client = await answered()
    await asyncio.sleep(0)
    assert client.packets == [b""]  # with which aiohttp sends them


async def test_last_events_go_out_with_the_end() -> None:
    client = await answered()
    await client.stream.write(b"one")
    await client.stream.end(b"[DONE]")
    await asyncio.sleep(0)
    assert not client.packets
    client.writer.write_eof.assert_awaited_once_with(b"one[DONE]")


async def test_event_of_the_hot_path_follows_those_before() -> None:
    client = await answered()
    await client.stream.write(b"one")
    client.stream.write_at_once(b"two")
    assert client.packets == [b"one"]
    client.transport.write.assert_called_once_with(b"3\r\ntwo\r\n")


async def test_client_that_leaves_as_its_first_event_comes_gets_no_more_signs_of_life() -> None:
    async def first() -> AsyncGenerator[bytes, None]:
        yield b"one"

    client, stopped = Client(), asyncio.Event()

    async def stall(_: bytes) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    client.protocol.writing_paused, client.writer.write.side_effect = True, stall
    await_events(client.request, WIRE, 60)
    client.request[_WAITING].end_silence(0)
    await asyncio.sleep(0)
    sending = asyncio.create_task(send(client.request, first(), WIRE, 60))
    await asyncio.sleep(0)
    await cancelled([sending])
    await asyncio.sleep(0)
    assert stopped.is_set()


async def test_response_that_moves_loses_no_event() -> None:
    client = await answered()
    await client.stream.write(b"one")
    await client.stream.end(None)
    assert client.packets == [b"one"]
    assert client.transport.close.called


@pytest.mark.parametrize("reason", ["much is held", "the client reads slowly", "the client has left"])
async def test_event_waits_for_no_other_if(reason: str) -> None:
    client = await answered()
    client.protocol.writing_paused = reason == "the client reads slowly"
    client.transport.is_closing.return_value = reason == "the client has left"
    events = [b"one", b"x" * LONG_FRAME] if reason == "much is held" else [b"one"]
    for event in events:
        await client.stream.write(event)
    assert b"".join(client.packets) == b"".join(events)
