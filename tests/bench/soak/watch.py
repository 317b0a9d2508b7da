"""Samples of a server during a soak: its memory and its store must not grow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from penstock.services.store.database import Database
from tests.support.server_process import ServerProcess
from tests.support.stores import database_at

TTL = 10
"""Seconds for which responses are kept; a soak must last three times as long to show that they are removed."""

LEAK = 512
"""Allowed growth of memory in bytes per response: a leaked response takes ten times as much."""

SLACK = 2 * 2**20
"""Allowed growth of memory in bytes however short the soak is: a server still warms up during the first responses."""

PERIOD = 1.0
"""Seconds between two samples."""


@dataclass(frozen=True)
class Look:
    """A sample of memory and store, in bytes, after ``made`` responses."""

    made: int
    memory: int
    stored: int


@dataclass
class Watch:
    server: ServerProcess
    database: Database
    count: int
    looks: list[Look] = field(default_factory=list)
    made: int = 0
    began: float = field(default_factory=time.monotonic)

    def tell(self, made: int) -> None:
        self.made = made

    async def keep_looking(self) -> None:
        """Sample until cancelled."""
        while True:
            await self.look()
            self.show()
            await asyncio.sleep(PERIOD)

    async def look(self) -> None:
        self.looks.append(Look(self.made, resident(self.server.pid), await self.database.size()))

    def show(self) -> None:
        """Print a line of progress, once per 5 %."""
        before = self.looks[-2].made if len(self.looks) > 1 else -1
        if before * 20 // self.count != self.made * 20 // self.count:
            look, rate = self.looks[-1], self.made / max(time.monotonic() - self.began, 0.001)
            sizes = f"memory {look.memory / 1e6:6.1f} MB   store {look.stored / 1e6:6.1f} MB"
            print(f"{self.made:7,} of {self.count:,}   {rate:4.0f}/s   {sizes}", flush=True)


@asynccontextmanager
async def watching(server: ServerProcess, store: str, count: int) -> AsyncIterator[Watch]:
    """Sample a server and its store for the length of a block."""
    beside = database_at(store)
    await beside.open()
    watch = Watch(server, beside, count)
    looking = asyncio.create_task(watch.keep_looking())
    try:
        yield watch
        await watch.look()
        watch.show()
    finally:
        looking.cancel()
        await beside.close()


def resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def faults(looks: Sequence[Look], ttl: float = TTL) -> Iterator[str]:
    """Yield a message for memory and for the store if they grew: the last third is compared with the middle third.

    The store keeps responses for ``ttl`` seconds.
    """
    third = max(1, len(looks) // 3)
    before, last = looks[third : 2 * third] or looks[:1], looks[-third:]
    responses = max(1, median(look.made for look in last) - median(look.made for look in before))
    grown = median(look.memory for look in last) - median(look.memory for look in before)
    if grown > SLACK + LEAK * responses:
        yield f"memory grew by {grown / responses:.0f} bytes per response, {LEAK} at most were expected"
    if third * PERIOD > ttl and max(look.stored for look in last) > 1.5 * max(
        look.stored for look in looks[: 2 * third]
    ):
        yield "the store grew in the last third"
