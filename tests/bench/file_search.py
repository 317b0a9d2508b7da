"""The time of a search in a vector store, how it grows, and how long files take to be read for one.

    python -m tests.bench.file_search sqlite 10000 100000
    python -m tests.bench.file_search postgres 10000 100000

Chunks have 500 words of a vocabulary whose frequencies are those of a natural language (Zipf's law), and queries have
three to eight words of the same frequencies.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import accumulate
from pathlib import Path

from penstock.pipeline.protocol.tools import FileSearchOptions
from penstock.pipeline.tasks import in_thread
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.services.files.file_reader import FileReader
from penstock.stages.services.search.ingestion import GROUP, Ingestion
from penstock.stages.services.search.searcher import Searcher
from penstock.stages.services.search.terms import terms
from penstock.stages.services.store.store import Store
from penstock.stages.services.store.vector_stores import Chunk, Chunking, NewFile, StoredVectorStore
from tests.support.stores import database_at, running_postgres
from tests.support.vector_stores import uploaded

WORDS = 500
"""Words of a chunk."""

PER_FILE = 100
"""Chunks of a file."""

QUERIES = 200

MEGABYTES = 3.0
"""The size of the file that is read."""

_random = random.Random(7)


def _vocabulary() -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(_random.choices(letters, k=_random.randint(2, 10))) for _ in range(50_000)]


VOCABULARY = _vocabulary()
FREQUENCIES = list(accumulate(1 / (rank + 3) for rank in range(len(VOCABULARY))))


def some_words(count: int) -> str:
    return " ".join(_random.choices(VOCABULARY, cum_weights=FREQUENCIES, k=count))


@asynccontextmanager
async def open_database(kind: str) -> AsyncGenerator[Store, None]:
    """Open an empty store in SQLite or PostgreSQL for the length of the block, in files that are synced as usual."""
    with tempfile.TemporaryDirectory() as folder, running_postgres("shared_buffers=256MB", "autovacuum=on") as server:
        store = Store(database_at(server.url if kind == "postgres" else str(Path(folder) / "store.sqlite3")))
        await store.open()
        try:
            yield store
        finally:
            await store.close()


@asynccontextmanager
async def watched() -> AsyncGenerator[list[float], None]:
    """Yield a list that has the longest time, in seconds, for which the event loop was held in the block."""
    longest = [0.0]

    async def tick() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            longest[0] = max(longest[0], time.monotonic() - before - 0.001)

    ticking = asyncio.create_task(tick())
    try:
        yield longest
    finally:
        ticking.cancel()


async def made(store: Store) -> StoredVectorStore:
    """Make a vector store, and return it."""
    await store.vector_stores.create("vs_bench", "", "", {}, None)
    found = await store.vector_stores.get("vs_bench", "")
    assert found
    return found


def _group(number: int) -> list[Chunk]:
    texts = [some_words(WORDS) for _ in range(GROUP)]
    return [Chunk(text, 0, terms(text, number)) for text in texts]


async def fill(store: Store, into: StoredVectorStore, chunks: int) -> None:
    """Add files until the vector store has so many chunks."""
    found = await store.vector_stores.get(into.id, "")
    have = found.counts.chunks if found else 0
    while have < chunks:
        await store.vector_stores.add(into.id, [NewFile(f"file-{have}", "a.txt", {}, Chunking())])
        ((_, number),) = await store.vector_stores.waiting(1)
        await store.vector_stores.claim(number)
        for first in range(0, PER_FILE, GROUP):
            group = await in_thread(_group, into.number)
            await store.vector_stores.append(number, first, group[: PER_FILE - first], None)
        await store.vector_stores.complete(number, 1, PER_FILE)
        have += PER_FILE


async def searches(store: Store, into: StoredVectorStore) -> str:
    """Return how long searches take."""
    searcher, seconds = Searcher(store), list[float]()
    (into,) = await searcher.stores([into.id], "", "")
    async with watched() as longest:
        for query in [some_words(_random.randint(3, 8)) for _ in range(QUERIES)]:
            before = time.monotonic()
            assert await searcher.search([into], "", [query], FileSearchOptions())
            seconds.append(time.monotonic() - before)
    cuts = statistics.quantiles(seconds, n=100)
    held = longest[0] * 1e3
    return f"p50 {cuts[49] * 1e3:.0f} ms, p99 {cuts[98] * 1e3:.0f} ms, loop held at most {held:.0f} ms"


async def ingestion(store: Store, into: StoredVectorStore) -> str:
    """Return how long a file takes to be read."""
    text = some_words(int(MEGABYTES * 1e6 / 7))
    size, name = len(text) / 1e6, await uploaded(store, "book.txt", text)
    await store.vector_stores.add(into.id, [NewFile(name, "book.txt", {}, Chunking())])
    load_encoding()
    async with Ingestion(store, FileReader()).running():
        async with watched() as longest:
            before = time.monotonic()
            while (found := await store.vector_stores.file(into.id, "", name)) and found.status == "in_progress":
                await asyncio.sleep(0.02)
            seconds = time.monotonic() - before
        assert found
        assert found.status == "completed", found.error
        await store.vector_stores.remove(into.id, "", name)
        while await store.vector_stores.waiting(1):
            await asyncio.sleep(0.1)
    held = longest[0] * 1e3
    return f"{seconds / size:.1f} s per MB ({found.chunks} chunks), loop held at most {held:.0f} ms"


async def figures(kind: str, sizes: list[int]) -> AsyncGenerator[str, None]:
    """Yield a line for each figure."""
    async with open_database(kind) as store:
        into = await made(store)
        yield f"{kind}: a file is read in {await ingestion(store, into)}"
        for size in sizes:
            await fill(store, into, size)
            yield f"{kind}: {size} chunks, {await store.context.size() / 1e6:.0f} MB: {await searches(store, into)}"


async def main(kind: str, *sizes: str) -> None:
    """Print the figures of a database for stores of these sizes."""
    async for line in figures(kind, [int(size) for size in sizes]):
        _print(line)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
