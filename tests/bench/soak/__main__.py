"""Thousands of short responses of every kind through one server, whose memory and store have to stay as they are.

    python -m tests.bench.soak [--count N] [--store PATH | postgres | postgresql://...]

The server is a process of its own over a scripted engine, and keeps responses for seconds only.
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

from penstock.stages.services.store.database import Database
from tests.bench.soak.kinds import soak
from tests.support.server_process import ServerProcess, running_process
from tests.support.stores import FAST, database_at, empty_schema, open_store, running_postgres

TTL = 10
"""Seconds for which responses are kept; a soak that is over before three times that cannot tell whether they go."""

OPTIONS = ("--store-ttl", str(TTL), "--stream-ttl", "5", "--max-background", "16", "--log-level", "WARNING")

LEAK = 512
"""Bytes per response by which memory may grow: what a response alone takes, if it stays, is ten times that."""

SLACK = 2 * 2**20
"""Bytes by which memory may grow anyway, as after a few responses it is still warming up."""

PERIOD = 1.0
"""Seconds between two looks."""


@dataclass(frozen=True)
class Look:
    """How things are when so many responses are ``made``."""

    made: int
    memory: int
    stored: int


@dataclass
class Watch:
    """Looks at a server now and then, and shows how far it is."""

    server: ServerProcess
    database: Database
    count: int
    looks: list[Look] = field(default_factory=list)
    made: int = 0
    began: float = field(default_factory=time.monotonic)

    def tell(self, made: int) -> None:
        """So many responses are made."""
        self.made = made

    async def keep_looking(self) -> None:
        """Look, and again."""
        while True:
            await self.look()
            self.show(end="\r")
            await asyncio.sleep(PERIOD)

    async def look(self) -> None:
        """Look once."""
        self.looks.append(Look(self.made, resident(self.server.pid), await self.database.size()))

    def show(self, end: str = "\n") -> None:
        """One line: in place on a terminal, else one for each twentieth."""
        if sys.stderr.isatty():
            print(self._line(), end=end, file=sys.stderr, flush=True)
        elif self._passed_a_twentieth():
            print(self._line(), file=sys.stderr, flush=True)

    def _passed_a_twentieth(self) -> bool:
        before = self.looks[-2].made if len(self.looks) > 1 else -1
        return before * 20 // self.count != self.made * 20 // self.count

    def _line(self) -> str:
        part, look = min(1.0, self.made / self.count), self.looks[-1]
        rate = self.made / max(time.monotonic() - self.began, 0.001)
        bar = ("#" * round(20 * part)).ljust(20, ".")
        sizes = f"memory {look.memory / 1e6:6.1f} MB   store {look.stored / 1e6:6.1f} MB"
        return f"[{bar}] {part:4.0%}   {self.made:,} of {self.count:,}   {rate:4.0f}/s   {sizes}"


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def faults(looks: Sequence[Look]) -> Iterator[str]:
    """What is wrong with how memory and store went: the last third is held against the one before."""
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
    """Soak a server over that store; whatever was wrong."""
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
    report(watch, seconds)
    return wrong


async def left_over(store: str) -> list[str]:
    """What no server runs any more, though it has not ended."""
    async with open_store(store) as left:
        return [f"{orphan.stored.response.id} has not ended" for orphan in await left.orphans()]


def report(watch: Watch, seconds: float) -> None:
    """Say how it went."""
    took = time.monotonic() - watch.began
    print(f"{watch.made:,} responses in {took:.0f} s; the server stopped within {seconds:.1f} s")
    print("responses   memory, MB   store, MB")
    for look in watch.looks[:: max(1, len(watch.looks) // 12)]:
        print(f"{look.made:9,d}{look.memory / 1e6:13.1f}{look.stored / 1e6:12.1f}")


@asynccontextmanager
async def place(store: str | None, folder: Path) -> AsyncIterator[str]:
    """Where the store is: there, or in a new file, or on a PostgreSQL of our own that cleans up as others do."""
    if store == "postgres":
        with running_postgres(*FAST, "autovacuum=on", "autovacuum_naptime=5") as server:
            async with empty_schema(server) as url:
                yield url
    else:
        yield store or str(folder / "store.sqlite3")


async def main() -> int:
    """Soak, and return how the process is to end."""
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
