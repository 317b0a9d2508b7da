"""Run thousands of short responses of every kind through one server; its memory and store must not grow.

    python -m tests.bench.soak [--count N] [--store PATH | postgres | postgresql://...] [--programs]

The server runs in a process of its own over a scripted engine, and keeps responses for a few seconds only.  With
``--programs``, the responses are those of programs that wait for their clients, and go on at another server.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from tests.bench.soak.kinds import soak
from tests.bench.soak.programs import soaked_programs
from tests.bench.soak.watch import TTL, faults, watching
from tests.support.orphans import ending_with_us
from tests.support.server_process import running_process
from tests.support.stores import FAST, empty_schema, open_store, running_postgres

OPTIONS = ("--store-ttl", str(TTL), "--stream-ttl", "5", "--max-background", "16", "--log-level", "WARNING")


async def soaked(store: str, count: int, folder: Path) -> list[str]:
    async with running_process(store, folder, "brisk", *OPTIONS) as server:
        async with watching(server, store, count) as watch:
            await soak(server, count, tell=watch.tell)
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
    os.environ.update(ending_with_us())
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak")
    parser.add_argument("--count", type=int, default=20_000, help="responses")
    parser.add_argument("--store", help="a path, a postgresql:// URL, or just postgres; a new file without it")
    parser.add_argument("--programs", action="store_true", help="programs that sleep, and a server that is killed")
    wanted = parser.parse_args()
    with TemporaryDirectory(prefix="soak") as name:
        folder = Path(name)
        async with place(wanted.store, folder) as store:
            wrong = await (soaked_programs if wanted.programs else soaked)(store, wanted.count, folder)
    print("\n".join(wrong) or "Nothing grew, and nothing was left over.")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
