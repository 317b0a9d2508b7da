"""How many streams of so many tokens per second a server carries in time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.bench.core import Case, Window
from tests.bench.loopback import Server
from tests.bench.readers import ARRIVAL

RATE = 50.0
"""Tokens per second of each stream, one in a step."""

DELAY = 0.020
"""Seconds in which 99 of 100 tokens have to be with their clients."""

WARMING, MEASURED, BEHIND = 50, 150, 16
"""Tokens of each stream: ahead of those whose delay counts, those, and behind them so that none of those is held."""

LEAST = 20

BISECTIONS = 2


class Try(msgspec.Struct, frozen=True):
    """So many streams: seconds from when a token was due to its client, and microseconds of CPU per token."""

    streams: int
    median: float
    p99: float
    cpu: float

    @property
    def is_in_time(self) -> bool:
        """Whether the tokens come as they should."""
        return self.p99 < DELAY


async def tried(server: Server, streams: int) -> Try:
    """So many streams at once; once more where it was close, as the machine has pauses of its own."""
    async with server.running(Case(streams, 0), timed=True):
        await server.measured(Window(WARMING, 1, RATE))
        first = await _window(server, streams, WARMING)
        if first.is_in_time or first.p99 > 2 * DELAY:
            return first
        second = await _window(server, streams, WARMING + MEASURED + BEHIND)
        return min(first, second, key=lambda found: found.p99)


async def _window(server: Server, streams: int, ahead: int) -> Try:
    tokens = MEASURED + BEHIND
    measured = await server.measured(Window(tokens, 1, RATE))
    late = delays(server.arrivals, streams, slice(ahead, ahead + MEASURED), measured.begun)
    median, p99 = np.quantile(late, (0.5, 0.99), method="higher")
    return Try(streams, float(median), float(p99), measured.cpu * 1e6 / streams / tokens)


def delays(arrivals: Path, streams: int, tokens: slice, begun: float) -> Any:
    """Seconds from when each of these tokens was due to its arrival, endless where it has not arrived."""
    size = arrivals.stat().st_size // ARRIVAL.size
    blocks = np.fromfile(arrivals, [("at", "=f8"), ("stream", "=u4"), ("tokens", "=u4")], size)
    due = begun + np.arange(tokens.stop - tokens.start) / RATE
    late = np.full((streams, len(due)), np.inf)
    for number, stream in enumerate(np.unique(blocks["stream"])):
        of_stream = blocks[blocks["stream"] == stream]
        at = np.repeat(of_stream["at"], of_stream["tokens"])[tokens]
        late[number, : len(at)] = at - due[: len(at)]
    return late


async def search(server: Server, start: int, most: int, seconds: float) -> list[Try]:
    """All that was tried, for so long: double or halve until the limit lies between two, then look closer."""
    until = time.monotonic() + seconds
    tries = [await tried(server, start)]
    grows = tries[0].is_in_time
    while tries[-1].is_in_time == grows and (not grows or time.monotonic() < until):
        streams = tries[-1].streams * 2 if grows else tries[-1].streams // 2
        if not LEAST <= streams <= most:
            break
        tries.append(await tried(server, streams))
    for _ in range(BISECTIONS):
        late = [found.streams for found in tries if not found.is_in_time]
        if not late or not (low := carried(tries)) or time.monotonic() > until:
            break
        tries.append(await tried(server, round((low * min(late)) ** 0.5)))
    return tries


def carried(tries: list[Try]) -> int:
    """The most streams whose tokens came in time."""
    return max((found.streams for found in tries if found.is_in_time), default=0)


def pace_table(tries: dict[str, list[Try]]) -> str:
    """All that was tried, for people to read."""
    lines = [f"{'50 tokens/s a stream':40s}{'streams':>8s}{'p50, ms':>10s}{'p99, ms':>10s}{'us per token':>14s}"]
    for name, found in tries.items():
        for one in sorted(found, key=lambda one: one.streams):
            delay = f"{one.median * 1e3:10.1f}{one.p99 * 1e3:10.1f}"
            lines.append(f"{name:40s}{one.streams:8d}{delay}{one.cpu:14.1f}")
    return "\n".join(lines)
