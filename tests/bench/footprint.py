"""A server's memory per open stream, and per token kept for replay."""

from __future__ import annotations

from tests.bench.core import Case, Window
from tests.bench.loopback import Server

STREAMS = 20
"""Number of background responses; the server keeps their tokens."""


async def open_stream(server: Server, streams: int) -> float:
    """Return the bytes of a stream that has begun; a first stream warms up what all of them share."""
    async with server.running(Case(1, 0)):
        pass
    async with server.running(Case(streams, 0)) as begun:
        return (begun.memory[1] - begun.memory[0]) / streams


async def retained_token(server: Server, tokens: int) -> float:
    """Return the bytes per token of a background response, whose events can all be replayed."""
    async with server.running(Case(STREAMS, 0), background=True, store=True):
        await server.measured(Window(256, 1))
        measured = await server.measured(Window(tokens, 1))
    return (measured.memory[1] - measured.memory[0]) / STREAMS / tokens
