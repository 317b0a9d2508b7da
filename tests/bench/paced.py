"""The number of streams at a fixed rate that a server can deliver in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.bench.apis import APIS, CHAT
from tests.bench.core import FILL, Case, Window
from tests.bench.loopback import Server, Servers
from tests.bench.readers import ARRIVAL

RATE = 50.0
"""Tokens per second of each stream, one in a step."""

DELAY = 0.020
"""Seconds within which 99 of 100 tokens have to reach their clients."""

WARMING, MEASURED = 50, 100
"""Tokens of each stream: to warm up, and to measure."""

ASKED = APIS[CHAT].path, APIS[CHAT].asking("Hi")

FIRST = 300
"""Streams of the first try of each server."""

COARSE, FINE = 1.6, 1.15
"""Between the streams of a server in one round and in the next, more if they were in time, otherwise fewer.

The finer one is used from the first change of direction on."""


class Try(msgspec.Struct, frozen=True):
    """The delays of a number of streams, in seconds from due time to arrival, and microseconds of CPU per token."""

    streams: int
    median: float
    p99: float
    cpu: float

    @property
    def is_in_time(self) -> bool:
        return self.p99 < DELAY


async def tried(server: Server, streams: int) -> Try:
    """Measure ``streams`` at once; repeat a near miss, because the machine has pauses of its own."""
    async with server.running(Case(streams), api=ASKED, timed=True):
        await server.measured(Window(WARMING, 1, RATE))
        first = await _window(server, streams, WARMING)
        if first.is_in_time or first.p99 > 2 * DELAY:
            return first
        second = await _window(server, streams, WARMING + MEASURED)
        return min(first, second, key=lambda found: found.p99)


async def overloaded(server: Server, streams: int) -> tuple[Try, Try]:
    """Measure more streams than the server can deliver in time, in two windows one after the other."""
    async with server.running(Case(streams), api=ASKED, timed=True):
        await server.measured(Window(WARMING, 1, RATE))
        sooner = await _window(server, streams, WARMING)
        return sooner, await _window(server, streams, WARMING + MEASURED)


async def _window(server: Server, streams: int, ahead: int) -> Try:
    measured = await server.measured(Window(MEASURED, 1, RATE))
    late = delays(server.arrivals, streams, slice(FILL + ahead, FILL + ahead + MEASURED), measured.begun)
    median, p99 = np.quantile(late, (0.5, 0.99), method="higher")
    return Try(streams, float(median), float(p99), measured.cpu * 1e6 / streams / MEASURED)


def delays(arrivals: Path, streams: int, tokens: slice, begun: float) -> Any:
    """Return seconds from due time to arrival, per stream and token; infinity if a token has not arrived."""
    size = arrivals.stat().st_size // ARRIVAL.size
    blocks = np.fromfile(arrivals, [("at", "=f8"), ("stream", "=u4"), ("tokens", "=u4")], size)
    due = begun + np.arange(tokens.stop - tokens.start) / RATE
    late = np.full((streams, len(due)), np.inf)
    for number, stream in enumerate(np.unique(blocks["stream"])):
        of_stream = blocks[blocks["stream"] == stream]
        at = np.repeat(of_stream["at"], of_stream["tokens"])[tokens]
        late[number, : len(at)] = at - due[: len(at)]
    return late


async def up_and_down(servers: Servers, rounds: int) -> dict[str, list[Try]]:
    """Try each server once in a round, near the limit of its last one, and return the tries of each."""
    found: dict[str, list[Try]] = {which: [] for which in servers}
    for _ in range(rounds):
        for which, server in servers.items():
            found[which].append(await tried(server, next_streams(found[which])))
    return found


def next_streams(tries: Sequence[Try]) -> int:
    """Return the number of streams for the try after others."""
    if not tries:
        return FIRST
    last = tries[-1]
    factor = COARSE if all(found.is_in_time == last.is_in_time for found in tries) else FINE
    return round(last.streams * (factor if last.is_in_time else 1 / factor))


def overload_table(found: Sequence[tuple[Try, Try]]) -> str:
    head = [f"{'streams':>8s}", *(f"{name:>12s}" for name in ("p50, ms", "p99, ms", "p50, ms", "p99, ms"))]
    lines = [
        f"{sooner.streams:8d}"
        + "".join(f"{delay * 1e3:12.1f}" for each in (sooner, later) for delay in (each.median, each.p99))
        for sooner, later in found
    ]
    return "\n".join(["".join(head), *lines])


def pace_table(tries: Mapping[str, Sequence[Try]]) -> str:
    lines = [f"{'50 tokens/s a stream':40s}{'streams':>8s}{'p50, ms':>10s}{'p99, ms':>10s}{'us per token':>14s}"]
    for name, found in tries.items():
        for one in sorted(found, key=lambda one: one.streams):
            delay = f"{one.median * 1e3:10.1f}{one.p99 * 1e3:10.1f}"
            lines.append(f"{name:40s}{one.streams:8d}{delay}{one.cpu:14.1f}")
    return "\n".join(lines)
