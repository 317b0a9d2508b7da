"""The time of a search in a vector store, how it grows, and how long files take to be read for one.

    python -m tests.bench.file_search sqlite 10000 100000
    python -m tests.bench.file_search postgres 10000 100000

Chunks have 500 words of a vocabulary whose frequencies are those of a natural language (Zipf's law), and queries have
three to eight words of the same frequencies.  Vectors are random and have 768 numbers; another process is the server of
embeddings.  Each query and each file is run several times, and counts with its shortest time: the machine has pauses
of its own.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from penstock.extensions.tools.files.file_reader import FileReader
from penstock.extensions.tools.search.embedder import Embedder
from penstock.extensions.tools.search.ingestion import GROUP, Ingestion
from penstock.extensions.tools.search.kind import FileSearchOptions
from penstock.extensions.tools.search.ranking import unit
from penstock.extensions.tools.search.searcher import Searcher
from penstock.extensions.tools.search.terms import terms
from penstock.extensions.tools.search.vector_stores import (
    Chunk,
    Chunking,
    NewFile,
    StoredVectorStore,
    StoredVectorStores,
)
from penstock.pipeline.tasks import in_thread
from penstock.services.store.store import Store
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.stores import database_at, running_postgres
from tests.support.vector_stores import uploaded

WORDS = 500
"""Words of a chunk."""

PER_FILE = 100
"""Chunks of a file."""

QUERIES = 200

ROUNDS = 5
"""Searches for each query."""

DIMENSIONS = 768
"""Numbers of a vector."""

MEGABYTES = 3.0
"""The size of the file that is read."""

_random = random.Random(7)
_numbers = np.random.default_rng(7)


def _vocabulary() -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(_random.choices(letters, k=_random.randint(2, 10))) for _ in range(50_000)]


VOCABULARY = _vocabulary()
FREQUENCIES = list(accumulate(1 / (rank + 3) for rank in range(len(VOCABULARY))))


def some_words(count: int) -> str:
    return " ".join(_random.choices(VOCABULARY, cum_weights=FREQUENCIES, k=count))


def some_vectors(count: int) -> NDArray[np.float32]:
    return unit(_numbers.standard_normal((count, DIMENSIONS), np.float32))


# The server of embeddings


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "random"}]})


async def _embeddings(request: web.Request) -> web.Response:
    vectors = some_vectors(len((await request.json())["input"]))
    written = (f'{{"index": {at}, "embedding": {json.dumps(each.tolist())}}}' for at, each in enumerate(vectors))
    return web.Response(text=f'{{"data": [{", ".join(written)}]}}', content_type="application/json")


def _embed(pipe: Connection) -> None:
    asyncio.run(_embed_for_ever(pipe))


async def _embed_for_ever(pipe: Connection) -> None:
    app = web.Application()
    app.add_routes([web.get("/v1/models", _models), web.post("/v1/embeddings", _embeddings)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pipe.send(runner.addresses[0][1])
    await asyncio.Event().wait()


@contextmanager
def embedding_process() -> Iterator[str]:
    """Yield the URL of a server of embeddings, which runs for the length of the block."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_embed, args=(there,))
    process.start()
    there.close()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.kill()
        process.join()


# The store


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
    """Yield a list that has the longest time, in seconds, for which this process held its event loop in the block.

    A time in which the process did not compute does not count: other processes then held the machine.
    """
    longest = [0.0]

    async def tick() -> None:
        while True:
            before, computed = time.monotonic(), time.process_time()
            await asyncio.sleep(0.001)
            late = time.monotonic() - before - 0.001
            longest[0] = max(longest[0], min(late, time.process_time() - computed))

    ticking = asyncio.create_task(tick())
    try:
        yield longest
    finally:
        ticking.cancel()


async def made(store: Store) -> StoredVectorStore:
    """Make a vector store, and return it."""
    await store.part(StoredVectorStores).create("vs_bench", "", "", {}, None)
    found = await store.part(StoredVectorStores).get("vs_bench", "")
    assert found
    return found


def _group(number: int) -> list[Chunk]:
    texts = [some_words(WORDS) for _ in range(GROUP)]
    return [Chunk(text, 0, terms(text, number)) for text in texts]


async def fill(store: Store, into: StoredVectorStore, chunks: int) -> None:
    """Add files until the vector store has so many chunks."""
    found = await store.part(StoredVectorStores).get(into.id, "")
    have = found.counts.chunks if found else 0
    while have < chunks:
        await store.part(StoredVectorStores).add(into.id, [NewFile(f"file-{have}", "a.txt", {}, Chunking())])
        ((_, number),) = await store.part(StoredVectorStores).waiting(1)
        await store.part(StoredVectorStores).claim(number)
        for first in range(0, PER_FILE, GROUP):
            group = (await in_thread(_group, into.number))[: PER_FILE - first]
            await store.part(StoredVectorStores).append(number, first, group, some_vectors(len(group)).tobytes())
        await store.part(StoredVectorStores).complete(number, 1, PER_FILE)
        have += PER_FILE


# Figures


async def searches(searcher: Searcher, into: StoredVectorStore) -> str:
    """Return how long searches take."""
    (into,) = await searcher.stores({into.id: ""}, "")
    queries = [some_words(_random.randint(3, 8)) for _ in range(QUERIES)]
    rounds = [[await timed(searcher, into, query) for query in queries] for _ in range(ROUNDS)]
    seconds, held = (list(map(min, *each)) for each in zip(*(zip(*each, strict=True) for each in rounds), strict=True))
    cuts = statistics.quantiles(seconds, n=100)
    first = rounds[0][0][0]
    return (
        f"p50 {cuts[49] * 1e3:.0f} ms, p99 {cuts[98] * 1e3:.0f} ms, the first one {first * 1e3:.0f} ms, "
        f"loop held at most {max(held) * 1e3:.0f} ms"
    )


async def timed(searcher: Searcher, into: StoredVectorStore, query: str) -> tuple[float, float]:
    """Return the seconds of a search, and the longest time for which it held the event loop."""
    async with watched() as longest:
        before = time.monotonic()
        assert await searcher.search([into], "", [query], FileSearchOptions())
        return time.monotonic() - before, longest[0]


async def ingestion(store: Store, into: StoredVectorStore, embedder: Embedder | None) -> str:
    """Return how long a file takes to be read."""
    text = some_words(int(MEGABYTES * 1e6 / 7))
    rounds = [await _ingested(store, into, embedder, text) for _ in range(ROUNDS)]
    seconds, held, counts = zip(*rounds, strict=True)
    size = len(text) / 1e6
    return f"{min(seconds) / size:.1f} s per MB ({counts[0]} chunks), loop held at most {min(held) * 1e3:.0f} ms"


async def _ingested(
    store: Store, into: StoredVectorStore, embedder: Embedder | None, text: str
) -> tuple[float, float, int]:
    name = await uploaded(store, "book.txt", text)
    await store.part(StoredVectorStores).add(into.id, [NewFile(name, "book.txt", {}, Chunking())])
    load_encoding()
    async with Ingestion(store, FileReader(), embedder).running():
        async with watched() as longest:
            before = time.monotonic()
            while (
                found := await store.part(StoredVectorStores).file(into.id, "", name)
            ) and found.status == "in_progress":
                await asyncio.sleep(0.02)
            seconds = time.monotonic() - before
        assert found
        assert found.status == "completed", found.error
        await store.part(StoredVectorStores).remove(into.id, "", name)
        while await store.part(StoredVectorStores).waiting(1):
            await asyncio.sleep(0.1)
    return seconds, longest[0], found.chunks


async def figures(kind: str, sizes: list[int]) -> AsyncGenerator[str, None]:
    """Yield a line for each figure."""
    with embedding_process() as url:
        embedder = Embedder(url)
        async with open_database(kind) as store:
            into = await made(store)
            for words, with_vectors in (("by words", None), ("with vectors", embedder)):
                yield f"{kind}: a file is read {words} in {await ingestion(store, into, with_vectors)}"
            for size in sizes:
                await fill(store, into, size)
                yield f"{kind}: {size} chunks, {await store.context.size() / 1e6:.0f} MB"
                for words, searcher in (("by words", Searcher(store)), ("hybrid", Searcher(store, embedder))):
                    yield f"{kind}: {size} chunks, {words}: {await searches(searcher, into)}"
        await embedder.close()


async def main(kind: str, *sizes: str) -> None:
    """Print the figures of a database for stores of these sizes."""
    async for line in figures(kind, [int(size) for size in sizes]):
        _print(line)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
