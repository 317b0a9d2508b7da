"""The CPU time of a search by words in a vector store in SQLite, beside the ranking of SQLite's own full-text index.

Both have the same chunks.  The figure of a round is the median over the queries, which both get in turns.
"""

from __future__ import annotations

import random
import sqlite3
import statistics
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.extensions.tools.search.kind import FileSearchOptions
from penstock.extensions.tools.search.searcher import Searcher
from tests.bench.figures import FTS, Comparison, Figure
from tests.bench.file_search import fill, made, some_words
from tests.support.stores import open_store

CHUNKS, QUERIES = 4_000, 100
FOUND = FileSearchOptions().most
"""Chunks that a search finds."""


async def search_costs(rounds: int, chunks: int = CHUNKS) -> Comparison:
    """Compare the milliseconds of CPU of a search."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite3"
        async with open_store(str(path)) as store:
            await fill(store, await made(store), chunks)
            with closing(_indexed(path)) as index:
                found = [await _round(Searcher(store), index) for _ in range(1 + rounds)][1:]
    ours, other = (Figure(tuple(figures)) for figures in zip(*found, strict=True))
    return Comparison({"chunks": chunks}, ours, other, beside=FTS)


def _indexed(path: Path) -> sqlite3.Connection:
    """Return a database with an index of the chunks of the store."""
    database = sqlite3.connect(path.with_name("alone.sqlite3"))
    database.execute("create virtual table chunks using fts5 (text)")
    with closing(sqlite3.connect(path)) as stored:
        database.executemany("insert into chunks values (?)", stored.execute("select text from vector_store_chunks"))
    database.commit()
    return database


async def _round(searcher: Searcher, index: sqlite3.Connection) -> tuple[float, float]:
    """Return the milliseconds of CPU of both."""
    [into] = await searcher.stores({"vs_bench": ""}, "")
    ours, other, found = list[float](), list[float](), 0
    for _ in range(QUERIES):
        query = some_words(random.randint(3, 8))
        started = time.process_time()
        found += len(await searcher.search([into], "", [query], FileSearchOptions()))
        between = time.process_time()
        ranked = "select text, rank from chunks where chunks match ? order by rank limit ?"
        index.execute(ranked, (query.replace(" ", " OR "), FOUND)).fetchall()
        ours.append((between - started) * 1e3)
        other.append((time.process_time() - between) * 1e3)
    assert found > QUERIES, "nearly nothing is found: rare words that no chunk has are not searched for"
    return statistics.median(ours), statistics.median(other)
