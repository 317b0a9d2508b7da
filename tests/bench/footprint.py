"""What a stream takes of a server's memory, and what a token that can be asked for again."""

from __future__ import annotations

from tests.bench.core import Case, Window
from tests.bench.loopback import Server

STREAMS = 20
"""Responses in the background, whose tokens are kept."""


async def open_stream(server: Server, streams: int) -> float:
    """Bytes of a stream that has begun; a first one brings what all need."""
    async with server.running(Case(1, 0)):
        pass
    async with server.running(Case(streams, 0)) as begun:
        return (begun.memory[1] - begun.memory[0]) / streams


async def retained_token(server: Server, tokens: int) -> float:
    """Bytes of a token of a response in the background, all of whose events can be asked for again."""
    async with server.running(Case(STREAMS, 0), background=True, store=True):
        await server.measured(Window(256, 1))
        measured = await server.measured(Window(tokens, 1))
    return (measured.memory[1] - measured.memory[0]) / STREAMS / tokens
