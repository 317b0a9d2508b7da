"""How many streams of so many tokens per second one server carries, and what each of them takes of its memory."""

from __future__ import annotations

import statistics

from tests.bench.core import Case, Window
from tests.bench.loopback import Pair, Server

RATE = 50.0
"""Tokens per second of each stream, one in a step."""

DELAY = 0.020
"""Seconds in which 99 of 100 steps have to be read by all streams."""

SECONDS = 4.0


async def delay(server: Server, streams: int) -> float:
    """The 99th percentile of the delays of the steps, in seconds."""
    async with server.running(Case(streams, 0)):
        await server.measured(Window(int(RATE), 1, RATE))
        measured = await server.measured(Window(int(RATE * SECONDS), 1, RATE))
    return statistics.quantiles(measured.delays, n=100)[98]


async def carried(server: Server, low: int, high: int, tries: int) -> int:
    """The most streams found whose steps are in time, between ``low`` and ``high``; 0 where even the least are late."""
    best = 0
    for _ in range(tries):
        streams = round((low * high) ** 0.5 / 10) * 10
        if await delay(server, streams) < DELAY:
            best = low = streams
        else:
            high = streams
    return best


async def open_stream(server: Server, streams: int = 500) -> float:
    """Bytes of a stream that has begun; a first one brings what all need."""
    async with server.running(Case(1, 0)):
        pass
    async with server.running(Case(streams, 0)) as begun:
        return (begun.memory[1] - begun.memory[0]) / streams


async def retained_token(server: Server, streams: int = 20, tokens: int = 4_096) -> float:
    """Bytes of a token of a response in the background, all of whose events can be asked for again."""
    async with server.running(Case(streams, 0), background=True, store=True):
        await server.measured(Window(256, 1))
        measured = await server.measured(Window(tokens, 1))
    return (measured.memory[1] - measured.memory[0]) / streams / tokens


async def streams_of_both(both: Pair, tries: int) -> tuple[int, int]:
    """What each carries."""
    return await carried(both.ours, 50, 3_200, tries), await carried(both.peer, 20, 800, tries)
