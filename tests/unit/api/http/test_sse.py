"""Streams that are written at once, past the writer of aiohttp."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

import aiohttp
import pytest
from aiohttp import HttpVersion10, HttpVersion11, web

from penstock.api.dialects.responses.form import PLAIN
from penstock.api.http.sse import EventStream

pytestmark = pytest.mark.io

PIECE = 2**16
"""Bytes of one write."""

MOST_PIECES = 2_000
"""Pieces that no kernel holds for a client that reads nothing."""

Writes: TypeAlias = Callable[[EventStream], Awaitable[None]]


@asynccontextmanager
async def served(write: Writes) -> AsyncGenerator[str, None]:
    """Serve a stream that ``write`` fills."""

    async def handle(request: web.Request) -> web.StreamResponse:
        with EventStream(request, PLAIN, period=60) as stream:
            await stream.begin()
            await stream.write(b"begun ")
            await write(stream)
            with suppress(ConnectionResetError):  # the client has left
                await stream.end(b"ended")
            return stream.answer

    app = web.Application()
    app.router.add_post("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}/"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("version", [HttpVersion10, HttpVersion11])
async def test_writes_at_once_stand_between_those_that_wait(version: aiohttp.HttpVersion) -> None:
    async def write(stream: EventStream) -> None:
        for piece in (b"one ", b"", b"two "):
            stream.write_at_once(piece)
        await stream.write(b"three ")

    async with served(write) as url, aiohttp.ClientSession(version=version) as client, client.post(url) as answer:
        assert await answer.read() == b"begun one two three ended"


async def test_stream_is_not_ready_while_its_client_does_not_read_and_after_it_has_left() -> None:
    stalled, left = asyncio.Event(), asyncio.Event()
    pieces = 0

    async def write(stream: EventStream) -> None:
        nonlocal pieces
        while stream.is_ready and pieces < MOST_PIECES:
            stream.write_at_once(bytes(PIECE))
            pieces += 1
            await asyncio.sleep(0)
        stalled.set()
        while not stream.is_ready:
            await asyncio.sleep(0.001)
        stream.write_at_once(b"read ")
        try:
            while stream.is_ready:
                await asyncio.sleep(0.001)
        finally:  # the server may cancel the handler of a client that has left
            left.set()

    async with served(write) as url, aiohttp.ClientSession() as client:
        async with client.post(url) as answer:
            await stalled.wait()
            assert 0 < pieces < MOST_PIECES
            assert await answer.content.readexactly(len(b"begun ") + pieces * PIECE + len(b"read "))
        await left.wait()
