"""StoredVectorStores: the vector stores of clients, and the files in them, with the work that is left to do with these.

A file in a vector store is read in the background: its row says so, and names the server that does it.  If that server
dies, another one begins anew.  The chunks of a file are found once all of them are stored, and deleted in steps after
the file has left its vector store, so that no writer waits long.  A file that is added again stays in its place with
its chunks, until a replacement outside of the vector store has chunks of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.extensions.tools.search import tables as sql
from penstock.extensions.tools.search.attribute_filters import columns_of, condition
from penstock.services.store import rows
from penstock.services.store.database import (
    BATCH,
    Row,
    Statement,
    Value,
    batches,
    placeholders,
    size_of,
    with_term,
)
from penstock.services.store.parts import StorePart

FileStatus: TypeAlias = Literal["in_progress", "completed", "cancelled", "failed"]
StoreStatus: TypeAlias = Literal["expired", "in_progress", "completed"]
Work: TypeAlias = Literal["read", "clear", "delete"]
"""The work that is left to do with a file: read it, delete its chunks, or delete the file and its chunks."""

Attributes: TypeAlias = Mapping[str, str | float | bool]

_FRESH_SECONDS = 60.0
"""Seconds after which a use of a vector store is written down again."""


@dataclass
class FileCounts:
    """The numbers of files by their status, and what they take."""

    by_status: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    chunks: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_status.values())

    def of(self, status: FileStatus) -> int:
        return self.by_status.get(status, 0)


@dataclass(frozen=True)
class StoredVectorStore:
    """A vector store; times are in seconds since 1970."""

    number: int
    id: str
    name: str
    metadata: Mapping[str, str]
    created_at: float
    active_at: float
    expires_days: int | None
    counts: FileCounts = field(default_factory=FileCounts)

    @property
    def expires_at(self) -> float | None:
        return None if self.expires_days is None else self.active_at + self.expires_days * sql.DAY

    def status(self, now: float) -> StoreStatus:
        if self.expires_at is not None and self.expires_at < now:
            return "expired"
        return "in_progress" if self.counts.of("in_progress") else "completed"


class FileError(msgspec.Struct, frozen=True):
    """The reason why a file could not be read."""

    code: Literal["server_error", "unsupported_file", "invalid_file"]
    message: str


class Chunking(NamedTuple):
    """The most tokens of a chunk, and the tokens that it has in common with the chunk before it."""

    tokens: int = 800
    overlap: int = 400


class NewFile(NamedTuple):
    """A file to put into a vector store."""

    id: str
    filename: str
    attributes: Attributes | None
    chunking: Chunking | None
    """None for those that it has there already, or else no attributes and the usual chunks."""


@dataclass(frozen=True)
class VectorStoreFile:
    """A file in a vector store."""

    number: int
    vector_store_id: str
    id: str
    filename: str
    created_at: float
    attributes: Attributes
    chunking: Chunking
    status: FileStatus
    error: FileError | None
    bytes: int
    chunks: int


@dataclass(frozen=True)
class Batch:
    """Files that were put into a vector store by one request."""

    id: str
    vector_store_id: str
    created_at: float
    is_cancelled: bool
    counts: FileCounts

    @property
    def status(self) -> FileStatus:
        if self.is_cancelled:
            return "cancelled"
        if self.counts.of("in_progress"):
            return "in_progress"
        return "failed" if self.counts.total and self.counts.of("failed") == self.counts.total else "completed"


@dataclass(frozen=True)
class Claimed:
    """A file with which this server has something to do."""

    file: VectorStoreFile
    owner: str
    work: Work


class Chunk(NamedTuple):
    """A chunk to store: its text, the place in it from which on it repeats nothing, and its terms."""

    text: str
    fresh: int
    terms: str


@dataclass(frozen=True)
class Page:
    """The part of a list that a request asks for: ``limit`` objects after or before the object with an id."""

    limit: int = 20
    newest_first: bool = True
    after: str | None = None
    before: str | None = None


class StoredVectorStores(StorePart):
    """The vector stores in the store."""

    name = "vector_stores"
    tables = sql.TABLES
    counted = ("vector_store_files",)

    # Vector stores

    async def create(self, store_id: str, owner: str, name: str, metadata: Mapping[str, str], days: int | None) -> None:
        """Store a new vector store, which expires ``days`` days after its last use, if ever."""
        row = (store_id, owner, rows.to_json(name), rows.to_json(metadata), time.time(), days)
        await self.context.writer.carry_out([Statement(sql.CREATE, row)], store_id)

    async def get(self, store_id: str, owner: str) -> StoredVectorStore | None:
        """Return a vector store; None if there is none."""
        for store in await self.find([store_id], owner):
            return store
        return None

    async def find(self, ids: Iterable[str], owner: str) -> Sequence[StoredVectorStore]:
        """Return those of the vector stores that exist."""
        names = rows.possible(ids)
        if not names:
            return ()
        query = (
            f"select {sql.STORE_COLUMNS} from vector_stores where owner = $1 and id in ({placeholders(len(names), 2)})"
        )
        return await self._counted(await self.context.read(query, owner, *names))

    async def page(self, owner: str, page: Page) -> tuple[Sequence[StoredVectorStore], bool]:
        """Return a page of vector stores, and True if there are more; raises `LookupError` for an unknown id."""
        read, has_more = await self._page("vector_stores", "id", sql.STORE_COLUMNS, page, {"owner": owner})
        return await self._counted(read), has_more

    async def update(
        self, store_id: str, owner: str, name: str, metadata: Mapping[str, str], days: int | None
    ) -> StoredVectorStore | None:
        """Change a vector store, and return it; None if there is none."""
        changed = Statement(sql.UPDATE, (store_id, owner, rows.to_json(name), rows.to_json(metadata), days))
        await self.context.writer.carry_out([changed], store_id)
        return await self.get(store_id, owner)

    async def touch(self, store_id: str, owner: str) -> None:
        """Note that a vector store is used, if that was not noted just now."""
        now = time.time()
        await self.context.writer.carry_out(
            [Statement(sql.TOUCH, (store_id, owner, now, now - _FRESH_SECONDS))], store_id
        )

    async def delete(self, store_id: str, owner: str) -> bool:
        """Delete a vector store durably; False if there is none.  The server deletes the chunks afterwards."""
        if not rows.can_exist(store_id):
            return False
        left = [Statement(step, (store_id,)) for step in (sql.ORPHANED, sql.DELETE_BATCHES)]
        deleted = Statement(sql.DELETE, (store_id, owner))
        return (await self.context.writer.carry_out([deleted, *left], store_id))[0] > 0

    # Files

    async def add(self, store_id: str, files: Sequence[NewFile], batch_id: str | None = None) -> None:
        """Put files into a vector store that exists, to be read.

        A file that is there already is read again, and found as before until then.
        """
        now = time.time()
        made = [Statement(sql.ADD_BATCH, (batch_id, store_id, now))] if batch_id else []
        await self.context.writer.carry_out(
            [*made, *(statement for file in files for statement in _added(store_id, file, batch_id, now))], store_id
        )

    async def file(self, store_id: str, owner: str, file_id: str) -> VectorStoreFile | None:
        """Return a file of a vector store; None if it is not there."""
        if not (rows.can_exist(store_id) and rows.can_exist(file_id)):
            return None
        for row in await self.context.read(sql.FILE, store_id, file_id, owner):
            return _file(row)
        return None

    async def files(
        self,
        store_id: str,
        owner: str,
        page: Page,
        status: str | None = None,
        batch_id: str | None = None,
    ) -> tuple[Sequence[VectorStoreFile], bool]:
        """Return a page of files, and True if there are more; raises `LookupError` for an unknown id."""
        wanted = {"vector_store_id": store_id, "owner": owner, "status": status, "batch_id": batch_id}
        found = {name: value for name, value in wanted.items() if value is not None}
        read, has_more = await self._page("vector_store_files", "file_id", sql.FILE_COLUMNS, page, found)
        return [_file(row) for row in read], has_more

    async def set_attributes(self, store_id: str, owner: str, file_id: str, attributes: Attributes) -> bool:
        """Replace the attributes of a file; False if it is not in the vector store."""
        if not (rows.can_exist(store_id) and rows.can_exist(file_id)):
            return False
        changed = Statement(sql.SET_ATTRIBUTES, (store_id, file_id, owner, rows.to_json(attributes)))
        if not (await self.context.writer.carry_out([changed], store_id))[0]:
            return False
        await self.context.writer.carry_out(_attributed(store_id, file_id, attributes), store_id)
        return True

    async def remove(self, store_id: str, owner: str, file_id: str) -> bool:
        """Take a file out of a vector store; False if it is not there."""
        if not (rows.can_exist(store_id) and rows.can_exist(file_id)):
            return False
        left = Statement(f"{sql.LEAVE} and file_id = $2 and owner = $3", (store_id, file_id, owner))
        return (await self.context.writer.carry_out([left], store_id))[0] > 0

    async def texts(self, file: VectorStoreFile) -> Sequence[str]:
        """Return the text of a file in pieces."""
        read = await self.context.read(sql.TEXTS, *_numbers(file.number))
        return [text[fresh:] for text, fresh in read]

    # Search

    async def readable(self, store_id: str, filters: Mapping[str, Any] | None = None) -> str | None:
        """Return the numbers of the files that can be searched, and pass a filter, with commas between them."""
        arguments: list[Value] = [store_id]
        passing = f"and {condition(filters, arguments)}" if filters else ""
        query = f"""
            select string_agg(cast(number as text), ',') from vector_store_files
            where vector_store_id = $1 and (status = 'completed' or chunks > 0) {passing}
        """
        ((numbers,),) = await self.context.read(query, *arguments) or ((None,),)
        return None if numbers is None else str(numbers)

    async def counts_of(self, terms: Sequence[str]) -> Sequence[int]:
        """Return in how many chunks each term stands."""
        counts: list[int] = []
        for some in batches(terms):
            counted = [f"select {at}, count(*) {with_term(f'${at + 1}')}" for at in range(len(some))]
            read = await self.context.read(" union all ".join(counted), *some)
            counts += (int(count) for _, count in sorted(read, key=itemgetter(0)))
        return counts

    async def chunks_with(self, terms: Sequence[str]) -> Sequence[str | None]:
        """Return the numbers of the chunks with each term, with commas between them."""
        found = (
            f"select {at}, string_agg(cast(number as text), ',') {with_term(f'${at + 1}')}" for at in range(len(terms))
        )
        read = await self.context.read(" union all ".join(found), *terms)
        return [numbers for _, numbers in sorted(read, key=itemgetter(0))]

    async def files_of(self, numbers: Iterable[int]) -> Mapping[int, VectorStoreFile]:
        """Return the files with these numbers that are in a vector store, or were replaced there just now."""
        found: dict[int, VectorStoreFile] = {}
        for some in batches(numbers):
            names = placeholders(len(some))
            query = f"""
                select {sql.FILE_COLUMNS} from vector_store_files
                where (vector_store_id is not null or replaces is not null) and number in ({names})
            """
            found.update((int(row[0]), _file(row)) for row in await self.context.read(query, *some))
        return found

    async def chunk_texts(self, numbers: Iterable[int]) -> Mapping[int, str]:
        """Return the texts of these chunks."""
        found: dict[int, str] = {}
        for some in batches(numbers):
            query = f"select number, text from vector_store_chunks where number in ({placeholders(len(some))})"
            found.update((int(number), str(text)) for number, text in await self.context.read(query, *some))
        return found

    async def vectors(self, numbers: Sequence[int]) -> Sequence[tuple[int, int, bytes]]:
        """Return the vectors of these files in pieces: the number of the file, that of its chunks, and 32-bit floats.

        A file that was read without vectors has none.
        """
        read = await self.context.read(sql.VECTORS.format(numbers=placeholders(len(numbers))), *numbers)
        return [(int(number), int(count), data) for number, count, data in read]

    # Batches

    async def batch(self, batch_id: str, store_id: str, owner: str) -> Batch | None:
        """Return a batch of files; None if there is none."""
        if not (rows.can_exist(store_id) and rows.can_exist(batch_id)):
            return None
        for created_at, is_cancelled in await self.context.read(sql.FIND_BATCH, batch_id, store_id, owner):
            counts = await self._counts("batch_id", [batch_id])
            return Batch(
                batch_id,
                vector_store_id=store_id,
                created_at=created_at,
                is_cancelled=bool(is_cancelled),
                counts=counts.get(batch_id, FileCounts()),
            )
        return None

    async def cancel(self, batch: Batch) -> None:
        """Give up the files of a batch that are not read yet."""
        place = (batch.id, batch.vector_store_id)
        steps = (sql.CANCEL_BATCH, sql.CANCEL_FILES, sql.CANCEL_REPLACEMENTS, sql.CANCEL_REPLACED)
        await self.context.writer.carry_out([Statement(step, place) for step in steps])

    # Work

    async def waiting(self, of_each: int) -> Sequence[tuple[str, int]]:
        """Return owners and numbers of files that wait for a server: the oldest of each owner, in turns."""
        read = await self.context.read(sql.WAITING, self.context.server_id, self.context.stale, of_each)
        return [(str(owner), int(number)) for owner, number in read]

    async def claim(self, number: int) -> Claimed | None:
        """Take over the work on a file; None if another server has done so, or if nothing is left to do."""
        own = self.context.server_id
        if not (await self.context.writer.carry_out([Statement(sql.CLAIM, (own, self.context.stale, number))]))[0]:
            return None
        for owner, work, *columns in await self.context.read(sql.CLAIMED, number, own):
            return Claimed(_file(columns), owner, work)
        return None

    async def append(self, number: int, first: int, chunks: Sequence[Chunk], vectors: bytes | None) -> bool:
        """Store the next chunks of a file, the first of them at a place; False if it is not to be read any more.

        Raises `DiskFull`.
        """
        own, at = self.context.server_id, (number << sql.PLACES) + first
        added = [Statement(sql.ADD_CHUNK, (number, own, at + place, *chunk)) for place, chunk in enumerate(chunks)]
        if vectors is not None:
            added.append(Statement(sql.ADD_VECTORS, (number, own, at, len(chunks), vectors)))
        async with self.context.room_for(sql.INDEXED * sum(size_of(each.arguments) for each in added)):
            return (await self.context.writer.carry_out(added))[0] > 0

    async def complete(self, number: int, size: int, chunks: int, store_id: str = "") -> bool:
        """Have the chunks of a file found, and False if it is not to be read any more.

        A replacement takes the place in its vector store, with all that was set meanwhile for the file that was there.
        """
        completed = await self.context.writer.carry_out(
            [
                Statement(sql.COMPLETE, (number, self.context.server_id, size, chunks)),
                Statement(sql.INHERIT, (number,)),
                Statement(sql.MAKE_ROOM, (number, store_id)),
                Statement(sql.INHERIT_ATTRIBUTES, (number,)),
                Statement(sql.TAKE_PLACE, (number, store_id)),
                Statement(f"{sql.LEFT_OVER} and status = 'completed'", (number,)),
            ]
        )
        return completed[0] > 0

    async def fail(self, number: int, error: FileError) -> None:
        """Note why a file cannot be read; one that it should replace keeps its chunks."""
        why = rows.to_json(error)
        await self.context.writer.carry_out(
            [
                Statement(sql.FAIL, (number, self.context.server_id, why)),
                Statement(sql.FAIL_REPLACED, (number, why)),
                Statement(f"{sql.LEFT_OVER} and status = 'failed'", (number,)),
            ]
        )

    async def give_up(self, number: int) -> None:
        """Delete a file whose vector store is gone."""
        await self.context.writer.carry_out([Statement(sql.LEFT_OVER, (number,))])

    async def release(self, number: int) -> None:
        """Let any server go on with a file."""
        await self.context.writer.carry_out([Statement(sql.RELEASE, (number, self.context.server_id))])

    async def clear(self, number: int) -> None:
        """Delete all chunks of a file, some at a time."""
        first, end = _numbers(number)
        for (last,) in await self.context.read(sql.LAST_CHUNK, first, end):
            for at in range(first, (last or first - 1) + 1, BATCH):
                some = at, at + BATCH
                await self.context.writer.carry_out(
                    [Statement(sql.DELETE_CHUNKS, some), Statement(sql.DELETE_VECTORS, some)]
                )

    async def cleared(self, number: int) -> None:
        """Note that a file has no chunks any more; one that has left its vector store is deleted."""
        own = (number, self.context.server_id)
        await self.context.writer.carry_out(
            [Statement(sql.CLEARED, own), Statement(sql.DELETED, own), Statement(sql.FORGET_ATTRIBUTES, (number,))]
        )

    async def sweep(self) -> None:
        """Empty the vector stores that have expired, and take files out that are deleted."""
        now = time.time()
        while ids := [name for (name,) in await self.context.read(sql.EXPIRED, now)]:
            await self.context.writer.carry_out([Statement(sql.LEAVE, (name,)) for name in ids])
        while ids := [name for (name,) in await self.context.read(sql.GONE, now)]:
            await self.context.writer.carry_out([Statement(sql.LEAVE_GONE, (name,)) for name in ids])

    # Reading

    async def _counted(self, read: Sequence[Row]) -> Sequence[StoredVectorStore]:
        counts = await self._counts("vector_store_id", [row[1] for row in read])
        return [
            StoredVectorStore(
                number,
                id=name,
                name=rows.from_json(title, _TEXT),
                metadata=rows.from_json(metadata, _METADATA),
                created_at=created_at,
                active_at=active_at,
                expires_days=days,
                counts=counts.get(name, FileCounts()),
            )
            for number, name, title, metadata, created_at, active_at, days in read
        ]

    async def _counts(self, column: str, ids: Sequence[str]) -> dict[str, FileCounts]:
        """Return the counts of files by the values of a column."""
        counts: dict[str, FileCounts] = {}
        for some in batches(ids):
            query = sql.COUNTS.format(column=column, names=placeholders(len(some)))
            for name, status, files, size, chunks in await self.context.read(query, *some):
                counted = counts.setdefault(name, FileCounts())
                counted.by_status[status] = int(files)
                counted.bytes += int(size)
                counted.chunks += int(chunks) if status == "completed" else 0
        return counts

    async def _page(
        self, table: str, key: str, columns: str, page: Page, found: Mapping[str, str]
    ) -> tuple[Sequence[Row], bool]:
        where = " and ".join(f"{name} = ${place}" for place, name in enumerate(found, 1))
        arguments: list[Value] = list(found.values())
        cursor = page.after if page.before is None else page.before
        is_reversed = page.before is not None
        descends = page.newest_first is not is_reversed
        if cursor is not None:
            at = await self._place(table, key, cursor, where, arguments)
            where += f" and number {'<' if descends else '>'} ${len(arguments) + 1}"
            arguments.append(at)
        order = "desc" if descends else "asc"
        query = f"select {columns} from {table} where {where} order by number {order} limit {page.limit + 1}"
        read = await self.context.read(query, *arguments)
        shown = read[: page.limit]
        return shown[::-1] if is_reversed else shown, len(read) > page.limit

    async def _place(self, table: str, key: str, cursor: str, where: str, arguments: Sequence[Value]) -> int:
        if rows.can_exist(cursor):
            query = f"select number from {table} where {where} and {key} = ${len(arguments) + 1}"
            for (number,) in await self.context.read(query, *arguments, cursor):
                return int(number)
        raise LookupError(cursor)


_TEXT = msgspec.json.Decoder(str)
_METADATA: msgspec.json.Decoder[Mapping[str, str]] = msgspec.json.Decoder(dict[str, str])
_ATTRIBUTES: msgspec.json.Decoder[Any] = msgspec.json.Decoder(dict[str, str | float | bool])
_ERROR = msgspec.json.Decoder(FileError)


def _added(store_id: str, file: NewFile, batch_id: str | None, now: float) -> Iterable[Statement]:
    place, chunking = (store_id, file.id), file.chunking or (None, None)
    attributes = None if file.attributes is None else rows.to_json(file.attributes)
    yield Statement(sql.GIVE_UP_REPLACEMENT, place)
    yield Statement(sql.ADD_AGAIN, (*place, batch_id, file.filename, attributes, *chunking))
    yield Statement(sql.ADD_REPLACEMENT, place)
    yield Statement(sql.ADD, (*place, batch_id, file.filename, now, attributes or "{}", *(file.chunking or Chunking())))
    if file.attributes is not None:
        yield from _attributed(*place, file.attributes)


def _attributed(store_id: str, file_id: str, attributes: Attributes) -> Sequence[Statement]:
    """Return the statements that write the attributes down for filters."""
    added = [Statement(sql.DELETE_ATTRIBUTES, (store_id, file_id))]
    for name, value in attributes.items():
        row = (store_id, file_id, rows.to_json(name), *columns_of(value))
        added.append(Statement(sql.ADD_ATTRIBUTE, row))
    return added


def _numbers(file: int) -> tuple[int, int]:
    """Return the first number of a file's chunks, and the number after the last one."""
    return file << sql.PLACES, (file + 1) << sql.PLACES


def _file(row: Row) -> VectorStoreFile:
    number, store_id, name, filename, created_at, attributes, tokens, overlap, status, error, size, chunks = row
    return VectorStoreFile(
        int(number),
        vector_store_id=store_id or "",
        id=name,
        filename=filename,
        created_at=created_at,
        attributes=rows.from_json(attributes, _ATTRIBUTES),
        chunking=Chunking(int(tokens), int(overlap)),
        status=status,
        error=rows.from_json(error, _ERROR) if error else None,
        bytes=int(size),
        chunks=int(chunks),
    )
