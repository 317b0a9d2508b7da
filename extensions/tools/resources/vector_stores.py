"""The routes of the vector stores API, and the background work on the files in vector stores."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec
from aiohttp import web

from penstock.api.file_reading import file_settings
from penstock.api.http.auth import OWNER
from penstock.api.http.bodies import Page
from penstock.api.http.errors import as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.pagination import AFTER, LIMIT, ORDER, ends
from penstock.api.http.query import AnyText, Choice
from penstock.api.http.request_body import off_loop, receive
from penstock.api.limits.admission import Admission
from penstock.api.resources.resources import BASE, ServerParts
from penstock.extensions.tools.files.file_reader import reader
from penstock.extensions.tools.files.stored_files import StoredFiles
from penstock.extensions.tools.search import vector_stores as stored
from penstock.extensions.tools.search.embedder import Embedder
from penstock.extensions.tools.search.ingestion import Ingestion
from penstock.extensions.tools.search.kind import FileSearchOptions
from penstock.extensions.tools.search.searcher import HasSearcher, Hit, Searcher
from penstock.extensions.tools.search.vector_stores import StoredVectorStores
from penstock.pipeline.errors import (
    InvalidRequest,
    StorageFull,
    StoredFileNotFound,
    StoreFailed,
    VectorStoreExpired,
    VectorStoreNotFound,
)
from penstock.pipeline.protocol.params.file_search import HybridWeights, RankingOptions
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.validation import read_body
from penstock.pipeline.protocol.params.vector_stores import (
    MOST_FILES,
    AddBatch,
    AddFile,
    ChunkingStrategy,
    CreateVectorStore,
    SearchVectorStore,
    StaticStrategy,
    UpdateFile,
    UpdateVectorStore,
)
from penstock.services.store.store import Store

BEFORE = AnyText("before", meaning="The id of the entry before which the page ends.")
FILTER = Choice(
    "filter",
    ("", "in_progress", "completed", "failed", "cancelled"),
    meaning="The status of the files to list; empty for all.",
)

PAGE = (LIMIT, ORDER, AFTER, BEFORE)

MOST_RESULTS = 10
"""Results of a search that names no number."""

POLL_AFTER_MS = 200
"""The time until a client that waits for files asks again; SDKs wait for up to five seconds by default."""


class FileCounts(msgspec.Struct, frozen=True):
    """The numbers of files by their status."""

    in_progress: int
    completed: int
    failed: int
    cancelled: int
    total: int

    @classmethod
    def of(cls, counts: stored.FileCounts) -> FileCounts:
        """Return the counts as the API has them."""
        each = {status: counts.of(status) for status in get_args(stored.FileStatus)}
        return cls(**each, total=counts.total)


class Expiration(msgspec.Struct, frozen=True):
    """The days after its last use after which a vector store expires."""

    days: int
    anchor: Literal["last_active_at"] = "last_active_at"


class VectorStore(msgspec.Struct, frozen=True):
    """A collection of files to search in."""

    id: str
    created_at: int
    name: str
    usage_bytes: int
    file_counts: FileCounts
    status: stored.StoreStatus
    expires_after: Expiration | None
    expires_at: int | None
    last_active_at: int
    metadata: Mapping[str, str]
    object: Literal["vector_store"] = "vector_store"


class DeletedVectorStore(msgspec.Struct, frozen=True):
    """The confirmation that a vector store was deleted; its files are kept."""

    id: str
    object: Literal["vector_store.deleted"] = "vector_store.deleted"
    deleted: Literal[True] = True


class StaticChunkingStrategy(msgspec.Struct, frozen=True):
    """The size of chunks, in tokens."""

    max_chunk_size_tokens: int
    chunk_overlap_tokens: int


class UsedChunking(msgspec.Struct, frozen=True):
    """The chunking strategy of a file."""

    static: StaticChunkingStrategy
    type: Literal["static"] = "static"


class VectorStoreFile(msgspec.Struct, frozen=True):
    """A file in a vector store, under the id of the file."""

    id: str
    created_at: int
    usage_bytes: int
    vector_store_id: str
    status: stored.FileStatus
    last_error: stored.FileError | None
    attributes: Mapping[str, str | float | bool]
    chunking_strategy: UsedChunking
    object: Literal["vector_store.file"] = "vector_store.file"


class DeletedVectorStoreFile(msgspec.Struct, frozen=True):
    """The confirmation that a file has left a vector store; the file itself is kept."""

    id: str
    object: Literal["vector_store.file.deleted"] = "vector_store.file.deleted"
    deleted: Literal[True] = True


class FileBatch(msgspec.Struct, frozen=True):
    """Files that were put into a vector store by one request."""

    id: str
    created_at: int
    vector_store_id: str
    status: stored.FileStatus
    file_counts: FileCounts
    object: Literal["vector_store.files_batch"] = "vector_store.files_batch"


class VectorStores(Page[VectorStore], frozen=True):
    """One page of the vector stores."""


class VectorStoreFiles(Page[VectorStoreFile], frozen=True):
    """One page of the files of a vector store."""


class TextContent(msgspec.Struct, frozen=True):
    """A piece of the text of a file."""

    text: str
    type: Literal["text"] = "text"


class FileContent(msgspec.Struct, frozen=True):
    """The text of a file, in pieces."""

    data: tuple[TextContent, ...]
    has_more: Literal[False] = False
    next_page: str | None = None
    object: Literal["vector_store.file_content.page"] = "vector_store.file_content.page"


class SearchResult(msgspec.Struct, frozen=True):
    """A chunk that fits the search."""

    file_id: str
    filename: str
    score: float
    attributes: Mapping[str, str | float | bool]
    content: tuple[TextContent, ...]


class SearchResults(msgspec.Struct, frozen=True):
    """The chunks that fit a search, best first."""

    search_query: tuple[str, ...]
    data: tuple[SearchResult, ...]
    has_more: Literal[False] = False
    next_page: str | None = None
    object: Literal["vector_store.search_results.page"] = "vector_store.search_results.page"


_LOOKING = (InvalidRequest, VectorStoreNotFound, StoreFailed)
_ADDING = (*_LOOKING, StoredFileNotFound, StorageFull, VectorStoreExpired)


@dataclass(frozen=True)
class VectorStoreRoutes:
    """The vector stores API over a store."""

    store: Store
    admission: Admission
    searcher: Searcher
    ingestion: Ingestion

    @property
    def stores(self) -> StoredVectorStores:
        """The vector stores in the store."""
        return self.store.part(StoredVectorStores)

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Return the routes under ``base``."""
        one = f"{base}/vector_stores/{{vector_store_id}}"
        file, batch = f"{one}/files/{{file_id}}", f"{one}/file_batches/{{batch_id}}"
        return (
            web.post(f"{base}/vector_stores", self.create),
            web.get(f"{base}/vector_stores", self.list_stores),
            web.get(one, self.retrieve),
            web.post(one, self.update),
            web.delete(one, self.delete),
            web.post(f"{one}/search", self.search),
            web.post(f"{one}/files", self.add_file),
            web.get(f"{one}/files", self.list_files),
            web.get(file, self.retrieve_file),
            web.post(file, self.update_file),
            web.delete(file, self.remove_file),
            web.get(f"{file}/content", self.content),
            web.post(f"{one}/file_batches", self.add_batch),
            web.get(batch, self.retrieve_batch),
            web.post(f"{batch}/cancel", self.cancel_batch),
            web.get(f"{batch}/files", self.list_batch),
        )

    # Vector stores

    @operation(Operation(VectorStore, body=CreateVectorStore, refusals=_ADDING))
    async def create(self, request: web.Request) -> web.Response:
        """Create a vector store; its files are read in the background."""
        self.store.check_keeps("vector stores")
        body, owner = await off_loop(read_body, await receive(request), CreateVectorStore), request[OWNER]
        await self.admission.storing(owner, self.store)
        files = [AddFile(file_id=name, chunking_strategy=body.chunking_strategy) for name in body.file_ids or ()]
        added = await self._named(files, owner, "file_ids[{}]")
        days = body.expires_after.days if body.expires_after else None
        store_id = f"vs_{secrets.token_hex(12)}"
        await self.stores.create(store_id, owner, body.name or "", body.metadata or {}, days)
        await self._add(store_id, added)
        return as_json(_shown(await self._found(store_id, owner)))

    @operation(Operation(VectorStores, query=PAGE, refusals=_LOOKING))
    async def list_stores(self, request: web.Request) -> web.Response:
        """List the vector stores, page by page."""
        wanted = _page(request)
        with _known_cursor(wanted):
            found, has_more = await self.stores.page(request[OWNER], wanted)
        shown = tuple(map(_shown, found))
        return as_json(VectorStores(shown, *ends(shown), has_more))

    @operation(Operation(VectorStore, refusals=_LOOKING))
    async def retrieve(self, request: web.Request) -> web.Response:
        """Retrieve a vector store."""
        return as_json(_shown(await self._of(request)))

    @operation(Operation(VectorStore, body=UpdateVectorStore, refusals=_LOOKING))
    async def update(self, request: web.Request) -> web.Response:
        """Change the name, the metadata or the expiration of a vector store."""
        body, store = await off_loop(read_body, await receive(request), UpdateVectorStore), await self._of(request)
        sent = body.model_fields_set
        name = body.name or "" if "name" in sent else store.name
        metadata = body.metadata or {} if "metadata" in sent else store.metadata
        days = store.expires_days
        if "expires_after" in sent:
            days = body.expires_after.days if body.expires_after else None
        changed = await self.stores.update(store.id, request[OWNER], name, metadata, days)
        if changed is None:
            raise VectorStoreNotFound(store.id)
        return as_json(_shown(changed))

    @operation(Operation(DeletedVectorStore, refusals=_LOOKING))
    async def delete(self, request: web.Request) -> web.Response:
        """Delete a vector store with all chunks of its files; the files are kept."""
        store_id = request.match_info["vector_store_id"]
        if not await self.stores.delete(store_id, request[OWNER]):
            raise VectorStoreNotFound(shortened(store_id))
        self.ingestion.wake()
        return as_json(DeletedVectorStore(store_id))

    @operation(Operation(SearchResults, body=SearchVectorStore, refusals=(*_LOOKING, VectorStoreExpired)))
    async def search(self, request: web.Request) -> web.Response:
        """Search in a vector store."""
        body, owner = await off_loop(read_body, await receive(request), SearchVectorStore), request[OWNER]
        name = request.match_info["vector_store_id"]
        stores = await self.searcher.stores({name: "vector_store_id"}, owner)
        options = _options(body, name)
        hits = await self.searcher.search(stores, owner, body.queries, options)
        return as_json(SearchResults(tuple(body.queries), tuple(map(_result, hits))))

    # Files

    @operation(Operation(VectorStoreFile, body=AddFile, refusals=_ADDING))
    async def add_file(self, request: web.Request) -> web.Response:
        """Put a file into a vector store; it is read in the background."""
        body, store = await off_loop(read_body, await receive(request), AddFile), await self._open(request)
        added = await self._named([body], request[OWNER], "file_id")
        _check_number(store, 1)
        await self._add(store.id, added)
        return as_json(await self._file(store.id, request[OWNER], body.file_id))

    @operation(Operation(VectorStoreFiles, query=(*PAGE, FILTER), refusals=_LOOKING))
    async def list_files(self, request: web.Request) -> web.Response:
        """List the files of a vector store, page by page."""
        return await self._listed(request, await self._of(request))

    @operation(Operation(VectorStoreFile, refusals=_LOOKING))
    async def retrieve_file(self, request: web.Request) -> web.Response:
        """Retrieve a file of a vector store."""
        store = await self._of(request)
        return _polled(await self._file(store.id, request[OWNER], request.match_info["file_id"]))

    @operation(Operation(VectorStoreFile, body=UpdateFile, refusals=_LOOKING))
    async def update_file(self, request: web.Request) -> web.Response:
        """Replace the attributes of a file."""
        body, store = await off_loop(read_body, await receive(request), UpdateFile), await self._of(request)
        file_id, owner = request.match_info["file_id"], request[OWNER]
        if not await self.stores.set_attributes(store.id, owner, file_id, body.attributes or {}):
            raise _no_file(file_id)
        return as_json(await self._file(store.id, owner, file_id))

    @operation(Operation(DeletedVectorStoreFile, refusals=_LOOKING))
    async def remove_file(self, request: web.Request) -> web.Response:
        """Take a file out of a vector store; the file itself is kept."""
        store, file_id = await self._of(request), request.match_info["file_id"]
        if not await self.stores.remove(store.id, request[OWNER], file_id):
            raise _no_file(file_id)
        self.ingestion.wake()
        return as_json(DeletedVectorStoreFile(file_id))

    @operation(Operation(FileContent, refusals=_LOOKING))
    async def content(self, request: web.Request) -> web.Response:
        """Return the text of a file in a vector store."""
        store, file_id = await self._of(request), request.match_info["file_id"]
        file = await self.stores.file(store.id, request[OWNER], file_id)
        if file is None:
            raise _no_file(file_id)
        texts = await self.stores.texts(file) if file.chunks else ()
        return as_json(FileContent(tuple(map(TextContent, texts))))

    # Batches

    @operation(Operation(FileBatch, body=AddBatch, refusals=_ADDING))
    async def add_batch(self, request: web.Request) -> web.Response:
        """Put several files into a vector store at once."""
        body, store = await off_loop(read_body, await receive(request), AddBatch), await self._open(request)
        added = await self._named(body.each, request[OWNER], "file_ids[{}]" if body.file_ids else "files[{}].file_id")
        _check_number(store, len(added))
        batch_id = f"vsfb_{secrets.token_hex(12)}"
        await self._add(store.id, added, batch_id)
        return as_json(_batch(await self._batch(store.id, request[OWNER], batch_id)))

    @operation(Operation(FileBatch, refusals=_LOOKING))
    async def retrieve_batch(self, request: web.Request) -> web.Response:
        """Retrieve a batch of files."""
        store = await self._of(request)
        return _polled(_batch(await self._batch(store.id, request[OWNER], request.match_info["batch_id"])))

    @operation(Operation(FileBatch, refusals=_LOOKING))
    async def cancel_batch(self, request: web.Request) -> web.Response:
        """Give up the files of a batch that are not read yet."""
        store, owner, batch_id = await self._of(request), request[OWNER], request.match_info["batch_id"]
        batch = await self._batch(store.id, owner, batch_id)
        if batch.status == "in_progress":
            await self.stores.cancel(batch)
            self.ingestion.wake()
        return as_json(_batch(await self._batch(store.id, owner, batch_id)))

    @operation(Operation(VectorStoreFiles, query=(*PAGE, FILTER), refusals=_LOOKING))
    async def list_batch(self, request: web.Request) -> web.Response:
        """List the files of a batch, page by page."""
        store = await self._of(request)
        batch = await self._batch(store.id, request[OWNER], request.match_info["batch_id"])
        return await self._listed(request, store, batch.id)

    # What a path names

    async def _of(self, request: web.Request) -> stored.StoredVectorStore:
        return await self._found(request.match_info["vector_store_id"], request[OWNER])

    async def _open(self, request: web.Request) -> stored.StoredVectorStore:
        """Return the vector store that gets files."""
        await self.admission.storing(request[OWNER], self.store)
        places = {request.match_info["vector_store_id"]: "vector_store_id"}
        return (await self.searcher.stores(places, request[OWNER]))[0]

    async def _found(self, store_id: str, owner: str) -> stored.StoredVectorStore:
        if (store := await self.stores.get(store_id, owner)) is None:
            raise VectorStoreNotFound(shortened(store_id))
        return store

    async def _file(self, store_id: str, owner: str, file_id: str) -> VectorStoreFile:
        if (file := await self.stores.file(store_id, owner, file_id)) is None:
            raise _no_file(file_id)
        return _shown_file(file)

    async def _batch(self, store_id: str, owner: str, batch_id: str) -> stored.Batch:
        if (batch := await self.stores.batch(batch_id, store_id, owner)) is None:
            raise VectorStoreNotFound(shortened(batch_id), kind="File batch", param="batch_id")
        return batch

    async def _listed(
        self, request: web.Request, store: stored.StoredVectorStore, batch_id: str | None = None
    ) -> web.Response:
        wanted, status = _page(request), FILTER.read(request) or None
        with _known_cursor(wanted):
            found, has_more = await self.stores.files(store.id, request[OWNER], wanted, status, batch_id)
        shown = tuple(map(_shown_file, found))
        return as_json(VectorStoreFiles(shown, *ends(shown), has_more))

    async def _named(self, files: Sequence[AddFile], owner: str, place: str) -> list[stored.NewFile]:
        """Return the files to add, each once; raises `StoredFileNotFound` for one that the client does not have.

        ``place`` is where their ids are in the request, with ``{}`` for the position of the file.
        """
        added: dict[str, stored.NewFile] = {}
        for position, file in enumerate(files):
            known = await self.store.part(StoredFiles).get(file.file_id, owner)
            if known is None:
                raise StoredFileNotFound(shortened(file.file_id), param=place.format(position))
            chunking = _chunking(file.chunking_strategy)
            added[known.id] = stored.NewFile(known.id, known.filename, file.attributes, chunking)
        return list(added.values())

    async def _add(self, store_id: str, files: Sequence[stored.NewFile], batch_id: str | None = None) -> None:
        if files:
            await self.stores.add(store_id, files, batch_id)
            self.ingestion.wake()


def _page(request: web.Request) -> stored.Page:
    after, before = AFTER.read(request), BEFORE.read(request)
    if after is not None and before is not None:
        raise InvalidRequest("after and before exclude each other.", param="before")
    return stored.Page(LIMIT.read(request), ORDER.read(request) == "desc", after, before)


@contextmanager
def _known_cursor(page: stored.Page) -> Iterator[None]:
    """Refuse a page that begins at an object that is not in the list."""
    try:
        yield
    except LookupError as error:
        param = "after" if page.before is None else "before"
        raise InvalidRequest(f"There is no {shortened(str(error.args[0]))!r} in this list.", param=param) from error


def _check_number(store: stored.StoredVectorStore, added: int) -> None:
    if store.counts.total + added > MOST_FILES:
        raise InvalidRequest(f"A vector store may have {MOST_FILES:,} files.", param="vector_store_id")


def _chunking(strategy: ChunkingStrategy | None) -> stored.Chunking | None:
    if strategy is None:
        return None
    if not isinstance(strategy, StaticStrategy):
        return stored.Chunking()
    return stored.Chunking(strategy.static.max_chunk_size_tokens, strategy.static.chunk_overlap_tokens)


def _options(body: SearchVectorStore, store_id: str) -> FileSearchOptions:
    ranking = body.ranking_options or RankingOptions()
    weights = ranking.hybrid_search or HybridWeights(embedding_weight=1.0, text_weight=1.0)
    return FileSearchOptions(
        (store_id,),
        most=body.max_num_results or MOST_RESULTS,
        filters=None if body.filters is None else body.filters.form,
        score_threshold=ranking.score_threshold or 0.0,
        embedding_weight=weights.embedding_weight,
        text_weight=weights.text_weight,
    )


def _shown(store: stored.StoredVectorStore) -> VectorStore:
    return VectorStore(
        store.id,
        created_at=int(store.created_at),
        name=store.name,
        usage_bytes=store.counts.bytes,
        file_counts=FileCounts.of(store.counts),
        status=store.status(time.time()),
        expires_after=None if store.expires_days is None else Expiration(store.expires_days),
        expires_at=None if store.expires_at is None else int(store.expires_at),
        last_active_at=int(store.active_at),
        metadata=store.metadata,
    )


def _polled(shown: VectorStoreFile | FileBatch) -> web.Response:
    """Return what clients retrieve until its end, with the time to wait in the header that SDKs read."""
    response = as_json(shown)
    if shown.status == "in_progress":
        response.headers["openai-poll-after-ms"] = str(POLL_AFTER_MS)
    return response


def _shown_file(file: stored.VectorStoreFile) -> VectorStoreFile:
    return VectorStoreFile(
        file.id,
        created_at=int(file.created_at),
        usage_bytes=file.bytes,
        vector_store_id=file.vector_store_id,
        status=file.status,
        last_error=file.error,
        attributes=file.attributes,
        chunking_strategy=UsedChunking(StaticChunkingStrategy(*file.chunking)),
    )


def _batch(batch: stored.Batch) -> FileBatch:
    counts = FileCounts.of(batch.counts)
    return FileBatch(
        batch.id,
        created_at=int(batch.created_at),
        vector_store_id=batch.vector_store_id,
        status=batch.status,
        file_counts=counts,
    )


def _result(hit: Hit) -> SearchResult:
    file = hit.file
    return SearchResult(
        file.id,
        filename=file.filename,
        score=round(hit.score, 4),
        attributes=file.attributes,
        content=(TextContent(hit.text),),
    )


def _no_file(file_id: str) -> VectorStoreNotFound:
    return VectorStoreNotFound(shortened(file_id), kind="Vector store file", param="file_id")


@asynccontextmanager
async def vector_stores(parts: ServerParts) -> AsyncGenerator[Sequence[web.RouteDef], None]:
    """Open the routes of the vector stores, and work on the files in them, for the length of a block."""
    store = parts.scheduler.store
    key = parts.settings.embeddings_key.get_secret_value() if parts.settings.embeddings_key else ""
    embedder = Embedder(parts.settings.embeddings, key) if parts.settings.embeddings else None
    host: Any = parts.tools.hosts.get("file_search")
    searcher = host.searcher if isinstance(host, HasSearcher) else Searcher(store, embedder)
    ingestion = Ingestion(store, reader(file_settings(parts.settings)), embedder)
    try:
        async with ingestion.running() if store.keeps else nullcontext():
            yield VectorStoreRoutes(store, parts.scheduler.admission, searcher, ingestion).routes(BASE)
    finally:
        if embedder is not None:
            await embedder.close()
