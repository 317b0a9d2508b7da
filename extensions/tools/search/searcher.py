"""The searcher: finds the chunks of vector stores that fit a query."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.extensions.tools.search.embedder import Embedder, NotEmbedded
from penstock.extensions.tools.search.kind import FileSearchOptions
from penstock.extensions.tools.search.ranking import (
    GAINS,
    Numbers,
    best,
    chosen,
    fused,
    nearest,
    numbers_in,
    scored,
    weights,
)
from penstock.extensions.tools.search.tables import PLACES
from penstock.extensions.tools.search.terms import term, words
from penstock.extensions.tools.search.vector_stores import StoredVectorStore, StoredVectorStores, VectorStoreFile
from penstock.pipeline.errors import VectorStoreExpired, VectorStoreNotFound
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.tasks import LARGE_BYTES, MANY_VALUES, apart, in_thread
from penstock.services.lru_cache import LruCache
from penstock.services.store.store import Store

logger = logging.getLogger(__name__)

MOST_READ = 1_000
"""Different words of a query that are read."""

LONG = 4_096
"""Characters of a query whose words are read in a thread."""

RANKED = 200
"""Chunks of each ranking that are fused."""

KEPT_VECTORS = 1 << 30
"""Bytes of vectors that are kept in memory.  A vector store with more is read anew by each search."""

_GROUP = 64 << 20
"""Bytes of vectors that are compared at once."""

_FILES = 16
"""Files whose vectors are read at once."""

_QUIET_SECONDS = 60.0


@dataclass(frozen=True)
class Hit:
    """A chunk that fits; ``score`` is between 0 and 1."""

    file: VectorStoreFile
    score: float
    text: str
    number: int


@runtime_checkable
class HasSearcher(Protocol):
    """A host that searches in vector stores."""

    searcher: Searcher


class Searcher:
    """Searches in the vector stores of ``store``, by words and, if there is an ``embedder``, by meaning."""

    def __init__(self, store: Store, embedder: Embedder | None = None) -> None:
        self._store = store
        self._stores = store.part(StoredVectorStores)
        self._embedder = embedder
        self._vectors: LruCache[NDArray[np.float32]] = LruCache(KEPT_VECTORS)
        self._warned_at = -_QUIET_SECONDS

    async def stores(self, places: Mapping[str, str], owner: str) -> list[StoredVectorStore]:
        """Return the vector stores with these ids, each of which has its place in the request.

        Raises `VectorStoreNotFound` or `VectorStoreExpired`.
        """
        found = {store.id: store for store in await self._stores.find(places, owner)}
        for name, place in places.items():
            if name not in found:
                raise VectorStoreNotFound(shortened(name), param=place)
            if found[name].status(time.time()) == "expired":
                raise VectorStoreExpired(name, param=place)
        return [found[name] for name in places]

    async def search(
        self, stores: Sequence[StoredVectorStore], owner: str, queries: Sequence[str], options: FileSearchOptions
    ) -> list[Hit]:
        """Return the chunks that fit any of the queries, best first; raises `StoreFailed`."""
        found = dict[int, float]()
        vectors = await self._embedded(queries)
        for store in stores:
            await self._stores.touch(store.id, owner)
            files = numbers_in(await self._stores.readable(store.id, options.filters))
            for query, vector in zip(queries, vectors, strict=True):
                for number, score in await self._found(store, files, query, vector, options):
                    found[number] = max(score, found.get(number, 0.0))
        ranked = sorted(found.items(), key=lambda hit: (-hit[1], hit[0]))
        fitting = ((number, score) for number, score in ranked if score >= options.score_threshold)
        return await self._hits(list(islice(fitting, options.most)))

    async def _embedded(self, queries: Sequence[str]) -> Sequence[NDArray[np.float32] | None]:
        """Return the vectors of the queries; without the other server, only words are searched for."""
        if self._embedder is not None:
            try:
                return list(await self._embedder.embed(queries))
            except NotEmbedded as error:
                if time.monotonic() - self._warned_at > _QUIET_SECONDS:
                    self._warned_at = time.monotonic()
                    logger.warning("Searching by words alone, as the server of --embeddings fails: %s", error)
        return [None] * len(queries)

    async def _found(
        self,
        store: StoredVectorStore,
        files: Numbers,
        query: str,
        vector: NDArray[np.float32] | None,
        options: FileSearchOptions,
    ) -> list[tuple[int, float]]:
        if not len(files):
            return []
        by_words = await self._by_words(store, files, query, max(options.most, RANKED))
        if vector is None:
            return by_words
        by_meaning = await self._by_meaning(files, vector)
        rankings = [
            (options.text_weight, [number for number, _ in by_words]),
            (options.embedding_weight, [number for number, _ in by_meaning]),
        ]
        return fused(rankings, RANKED)

    async def _by_words(
        self, store: StoredVectorStore, files: Numbers, query: str, most: int
    ) -> list[tuple[int, float]]:
        asked = await apart(len(query) > LONG, _words, query)
        if not asked:
            return []
        found = await self._stores.counts_of([term(store.number, 0, word) for word in asked])
        counts = dict(zip(asked, found, strict=True))
        heavy = weights(counts, store.counts.chunks)
        taken = [(word, level) for word in chosen(counts) for level in range(len(GAINS))]
        if not taken:
            return []
        read = await self._stores.chunks_with([term(store.number, level, word) for word, level in taken])
        gains = [(heavy[word] * GAINS[level], numbers) for (word, level), numbers in zip(taken, read, strict=True)]
        return await in_thread(_ranked, gains, files, sum(heavy.values()), most)

    async def _by_meaning(self, files: Numbers, vector: NDArray[np.float32]) -> list[tuple[int, float]]:
        """Return the nearest chunks; the vectors of many files are read and compared one group after another."""
        found, group, size = list[tuple[int, float]](), list[tuple[int, NDArray[np.float32]]](), 0
        for at in range(0, len(files), _FILES):
            for number, vectors in (await self._vectors_of(files[at : at + _FILES].tolist())).items():
                if vectors.shape[1] == len(vector):
                    group.append((number, vectors))
                    size += vectors.nbytes
            if group and (size > _GROUP or len(group) > MANY_VALUES or at + _FILES >= len(files)):
                found += await in_thread(_nearest, vector, group)
                group, size = [], 0
        return sorted(found, key=lambda hit: (-hit[1], hit[0]))[:RANKED]

    async def _vectors_of(self, files: Sequence[int]) -> Mapping[int, NDArray[np.float32]]:
        kept = {file: self._vectors.get(str(file)) for file in files}
        unknown = [file for file, vectors in kept.items() if vectors is None]
        pieces = await self._stores.vectors(unknown) if unknown else ()
        is_large = sum(len(data) for _, _, data in pieces) > LARGE_BYTES
        read = await apart(is_large, _joined, unknown, pieces)
        for file, vectors in read.items():
            self._vectors.put(str(file), vectors, vectors.nbytes + 64)
        return {file: vectors for file, vectors in {**kept, **read}.items() if vectors is not None}

    async def _hits(self, found: Sequence[tuple[int, float]]) -> list[Hit]:
        """Return the chunks of these numbers that are still there."""
        if not found:
            return []
        files = await self._stores.files_of({number >> PLACES for number, _ in found})
        texts = await self._stores.chunk_texts([number for number, _ in found])
        return [
            Hit(files[number >> PLACES], score, texts[number], number)
            for number, score in found
            if number in texts and number >> PLACES in files
        ]


def _joined(files: Sequence[int], pieces: Sequence[tuple[int, int, bytes]]) -> Mapping[int, NDArray[np.float32]]:
    """Return the vectors of each file, one in each row; none of a file without pieces."""
    parts = {file: list[NDArray[np.float32]]() for file in files}
    for file, count, data in pieces:
        parts[file].append(np.frombuffer(data, np.float32).reshape(count, -1))
    return {file: np.concatenate(some) if some else np.empty((0, 0), np.float32) for file, some in parts.items()}


def _words(query: str) -> list[str]:
    return list(islice(dict.fromkeys(words(query, is_query=True)), MOST_READ))


def _ranked(
    gains: Sequence[tuple[float, str | None]], files: Numbers, highest: float, most: int
) -> list[tuple[int, float]]:
    numbers, scores = scored(gains)
    visible = np.isin(numbers >> PLACES, files)
    return best(numbers[visible], scores[visible] / (highest or 1.0), most)


def _nearest(vector: NDArray[np.float32], group: Sequence[tuple[int, NDArray[np.float32]]]) -> list[tuple[int, float]]:
    numbers = np.concatenate([(number << PLACES) + np.arange(len(vectors)) for number, vectors in group])
    scores = np.concatenate([nearest(vector, vectors) for _, vectors in group])
    return best(numbers, scores, RANKED)
