"""Run thousands of short responses of every kind through one server; its memory and store must not grow.

    python -m tests.bench.soak [--count N] [--store PATH | postgres | postgresql://...]

The server runs in a process of its own over a scripted engine, and keeps responses for a few seconds only.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import uvloop

from penstock.services.store.database import Database
from tests.bench.soak.kinds import soak
from tests.support.server_process import ServerProcess, running_process
from tests.support.stores import FAST, database_at, empty_schema, open_store, running_postgres

TTL = 10
"""Seconds for which responses are kept; a soak must last three times as long to show that they are removed."""

OPTIONS = ("--store-ttl", str(TTL), "--stream-ttl", "5", "--max-background", "16", "--log-level", "WARNING")

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


def resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def faults(looks: Sequence[Look]) -> Iterator[str]:
    """Yield a message for memory and for the store if they grew: the last third is compared with the middle third."""
    third = max(1, len(looks) // 3)
    before, last = looks[third : 2 * third] or looks[:1], looks[-third:]
    responses = max(1, median(look.made for look in last) - median(look.made for look in before))
    grown = median(look.memory for look in last) - median(look.memory for look in before)
    if grown > SLACK + LEAK * responses:
        yield f"memory grew by {grown / responses:.0f} bytes per response, {LEAK} at most were expected"
    if third * PERIOD > TTL and max(look.stored for look in last) > 1.5 * max(
        look.stored for look in looks[: 2 * third]
    ):
        yield "the store grew in the last third"


async def soaked(store: str, count: int, folder: Path) -> list[str]:
    async with running_process(store, folder, "brisk", *OPTIONS) as server:
        beside = database_at(store)
        await beside.open()
        watch = Watch(server, beside, count)
        watching = asyncio.create_task(watch.keep_looking())
        try:
            await soak(server, count, tell=watch.tell)
            await watch.look()
            watch.show()
        finally:
            watching.cancel()
            await beside.close()
        stopping = time.monotonic()
        code = await server.kill(signal.SIGTERM)
        seconds = time.monotonic() - stopping
    wrong = [*faults(watch.looks), *(await left_over(store))]
    if code or seconds > 5:
        wrong.append(f"the server took {seconds:.1f} s to stop, and returned {code}")
    complaints = [line for line in server.log.read_text().splitlines() if "WARNING" in line or "ERROR" in line]
    wrong += complaints[:5]
    took = time.monotonic() - watch.began
    print(f"{watch.made:,} responses in {took:.0f} s; the server stopped within {seconds:.1f} s")
    return wrong


async def left_over(store: str) -> list[str]:
    """Return a fault for each response that has not ended although no server runs it."""
    async with open_store(store) as left:
        return [f"{orphan.stored.response.id} has not ended" for orphan in await left.orphans()]


@asynccontextmanager
async def place(store: str | None, folder: Path) -> AsyncIterator[str]:
    """Yield the place of the store: ``store``, a new file, or a new PostgreSQL that vacuums as in production."""
    if store == "postgres":
        with running_postgres(*FAST, "autovacuum=on", "autovacuum_naptime=5") as server:
            async with empty_schema(server) as url:
                yield url
    else:
        yield store or str(folder / "store.sqlite3")


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak")
    parser.add_argument("--count", type=int, default=20_000, help="responses")
    parser.add_argument("--store", help="a path, a postgresql:// URL, or just postgres; a new file without it")
    wanted = parser.parse_args()
    with TemporaryDirectory(prefix="soak") as name:
        folder = Path(name)
        async with place(wanted.store, folder) as store:
            wrong = await soaked(store, wanted.count, folder)
    print("\n".join(wrong) or "Nothing grew, and nothing was left over.")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
