"""The file search: a host shared by all responses, and the session of one response, whose files can be cited."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.extensions.tools.search.embedder import Embedder
from penstock.extensions.tools.search.kind import FileSearchOptions
from penstock.extensions.tools.search.queries import MOST_QUERIES, all_queries_in, bounded, queries_in
from penstock.extensions.tools.search.searcher import Hit, Searcher
from penstock.extensions.tools.search.vector_stores import StoredVectorStore
from penstock.pipeline.errors import InvalidRequest, StoreFailed
from penstock.pipeline.frames import FileSearchResults, ResolvedRequest
from penstock.pipeline.hosted_kinds import options_of
from penstock.pipeline.protocol.items import FileSearchCall, of_type
from penstock.services.file_marks import safe_name
from penstock.services.tools import FileSource, HostSettings, ToolResult

FIRST = 1_000
"""The number of the first part that a conversation finds; pages of the browser have lower ones."""

LONGEST = 96_000
"""Characters of the parts that one call returns; the rest, the least fitting, are left out."""

NOTHING = "Nothing in the files fits."

_HEADING = re.compile(r"^\[([0-9]{4,6})\] ([^\n]*) \((file-[0-9A-Za-z_-]{1,64})\)$", re.MULTILINE)


class FileSearchHost:
    """Searches in the vector stores that a request names."""

    def __init__(self, searcher: Searcher, embedder: Embedder | None = None) -> None:
        self.searcher = searcher
        self._embedder = embedder

    def session(self, request: ResolvedRequest) -> FileSearchSession:
        """Return a session, which knows the parts that the conversation has found before."""
        return FileSearchSession(self.searcher, request)

    async def check(self, request: ResolvedRequest) -> None:
        """Raise `VectorStoreNotFound` or `VectorStoreExpired` for a vector store that cannot be searched."""
        await _stores(self.searcher, request)

    async def close(self) -> None:
        if self._embedder is not None:
            await self._embedder.close()


def host(settings: HostSettings) -> FileSearchHost | None:
    """Return the host, if the server has a store."""
    if settings.store is None:
        return None
    embedder = Embedder(settings.embeddings, settings.embeddings_key) if settings.embeddings else None
    return FileSearchHost(Searcher(settings.store, embedder), embedder)


async def _stores(searcher: Searcher, request: ResolvedRequest) -> list[StoredVectorStore]:
    options = options_of(request.facts, "file_search", FileSearchOptions)
    places = {name: f"{options.path}.vector_store_ids[{at}]" for at, name in enumerate(options.stores)}
    return await searcher.stores(places, request.facts.origin.owner)


class FileSearchSession:
    """The searches of one response, each part of a file under a number of its own."""

    def __init__(self, searcher: Searcher, request: ResolvedRequest) -> None:
        self._searcher = searcher
        self._request = request
        self._sources = dict(_known(request))
        self._is_closed = False
        self._running: set[asyncio.Timeout] = set()

    def action(self, name: str, text: str) -> dict[str, Any]:
        """Return the queries of a call, which its item shows while it runs."""
        return {"queries": list(queries_in(text))}

    def source(self, cursor: int) -> FileSource | None:
        """Return the file of a part."""
        return self._sources.get(cursor)

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        written = all_queries_in(text)
        queries = bounded(written)
        try:
            async with asyncio.timeout(0 if self._is_closed else seconds) as deadline:
                self._running.add(deadline)
                try:
                    return await self._searched(queries, len(written))
                finally:
                    self._running.discard(deadline)
        except (InvalidRequest, StoreFailed) as error:
            why = str(error)
        except TimeoutError:
            why = "The call was cancelled." if self._is_closed else f"It took longer than {seconds:g} seconds."
        return ToolResult(why, why, FileSearchResults(queries, None))

    async def close(self) -> None:
        """End running calls."""
        self._is_closed = True
        for deadline in self._running:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())

    async def _searched(self, queries: tuple[str, ...], written: int) -> ToolResult:
        if not queries:
            why = 'Give the arguments as JSON: {"queries": ["..."]}.'
            return ToolResult(why, why, FileSearchResults((), None))
        facts = self._request.facts
        stores = await _stores(self._searcher, self._request)
        options = options_of(facts, "file_search", FileSearchOptions)
        hits = list(_bounded(await self._searcher.search(stores, facts.origin.owner, queries, options)))
        shown = [self._shown(hit) for hit in hits] or [NOTHING]
        if written > MOST_QUERIES:
            shown.append(f"Only the first {MOST_QUERIES} of {written} queries were searched for.")
        return ToolResult("\n\n".join(shown), data=FileSearchResults(queries, tuple(map(_result, hits))))

    def _shown(self, hit: Hit) -> str:
        """Return a part as the model reads it: no line of a file begins as a heading does."""
        number = max(self._sources, default=FIRST - 1) + 1
        self._sources[number] = FileSource(hit.file.id, hit.file.filename)
        lines = (f"L{at}: {line}" for at, line in enumerate(hit.text.splitlines()))
        return "\n".join((f"[{number}] {safe_name(hit.file.filename)} ({hit.file.id})", *lines))


def _bounded(hits: Iterable[Hit]) -> Iterator[Hit]:
    left = LONGEST
    for hit in hits:
        left -= len(hit.text)
        if left < 0:
            return
        yield hit


def _result(hit: Hit) -> dict[str, Any]:
    return {
        "attributes": dict(hit.file.attributes),
        "file_id": hit.file.id,
        "filename": hit.file.filename,
        "score": round(hit.score, 4),
        "text": hit.text,
    }


def _known(request: ResolvedRequest) -> Iterator[tuple[int, FileSource]]:
    """Yield the parts in the results that the model has read before."""
    for call in of_type(request.items, FileSearchCall):
        for heading in _HEADING.finditer(request.results.get(call.id, "")):
            yield int(heading[1]), FileSource(heading[3], heading[2])
