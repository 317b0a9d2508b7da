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
import numpy as np
from numpy.typing import NDArray

from penstock.pipeline.tasks import LARGE, apart
from penstock.services.store import rows
from penstock.services.store.attribute_filters import columns_of, condition
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
from penstock.services.store.heartbeats import of_dead_server
from penstock.services.store.writer import StoreContext

FileStatus: TypeAlias = Literal["in_progress", "completed", "cancelled", "failed"]
StoreStatus: TypeAlias = Literal["expired", "in_progress", "completed"]
Work: TypeAlias = Literal["read", "clear", "delete"]
"""The work that is left to do with a file: read it, delete its chunks, or delete the file and its chunks."""

Attributes: TypeAlias = Mapping[str, str | float | bool]

PLACES = 20
"""Bits of a chunk's number for its place in the file; the number of the file is in the others."""

_FRESH_SECONDS = 60.0
"""Seconds after which a use of a vector store is written down again."""

_DAY = 86400.0

_STORE_COLUMNS = "number, id, name, metadata, created_at, active_at, expires_days"

_FILE_COLUMNS = (
    "number, vector_store_id, file_id, filename, created_at, attributes, chunk_tokens, overlap_tokens, status, error, "
    "bytes, chunks"
)

_CREATE = """
    insert into vector_stores (id, owner, name, metadata, created_at, active_at, expires_days)
    values ($1, $2, $3, $4, $5, $5, $6)
"""

_UPDATE = "update vector_stores set name = $3, metadata = $4, expires_days = $5 where id = $1 and owner = $2"

_TOUCH = "update vector_stores set active_at = $3 where id = $1 and owner = $2 and active_at < $4"

_DELETE = "delete from vector_stores where id = $1 and owner = $2"

_LEAVE = """
    update vector_store_files set vector_store_id = null, batch_id = null, bytes = 0, work = 'delete'
    where vector_store_id = $1
"""

_ORPHANED = f"{_LEAVE} and not exists (select 1 from vector_stores where id = $1)"

_DELETE_BATCHES = """
    delete from vector_store_batches
    where vector_store_id = $1 and not exists (select 1 from vector_stores where id = $1)
"""

_COUNTS = """
    select {column}, status, count(*), sum(bytes), sum(chunks) from vector_store_files
    where {column} in ({names}) group by {column}, status
"""

_ADD = """
    insert into vector_store_files (vector_store_id, file_id, batch_id, owner, filename, created_at, attributes,
                                    chunk_tokens, overlap_tokens, status, bytes, chunks, work)
    select id, cast($2 as text), cast($3 as text), owner, cast($4 as text), cast($5 as double precision),
           cast($6 as text), cast($7 as bigint), cast($8 as bigint), 'in_progress', 0, 0, 'read'
    from vector_stores where id = $1
    and not exists (select 1 from vector_store_files where vector_store_id = $1 and file_id = $2)
"""

_IN_PLACE = "(select number from vector_store_files where vector_store_id = $1 and file_id = $2)"

_GIVE_UP_REPLACEMENT = f"update vector_store_files set work = 'delete', replaces = null where replaces in {_IN_PLACE}"

_ADD_AGAIN = """
    update vector_store_files
    set status = 'in_progress', error = null, batch_id = coalesce($3, batch_id), filename = $4,
        attributes = coalesce(cast($5 as text), attributes),
        chunk_tokens = coalesce(cast($6 as bigint), chunk_tokens),
        overlap_tokens = coalesce(cast($7 as bigint), overlap_tokens),
        work = case when work = 'read' then 'clear' else work end
    where vector_store_id = $1 and file_id = $2
"""

_ADD_REPLACEMENT = """
    insert into vector_store_files (file_id, owner, filename, created_at, attributes, chunk_tokens, overlap_tokens,
                                    status, bytes, chunks, work, replaces)
    select file_id, owner, filename, created_at, attributes, chunk_tokens, overlap_tokens,
           'in_progress', 0, 0, 'read', number
    from vector_store_files where vector_store_id = $1 and file_id = $2
"""

_IS_REPLACEMENT = "number = $1 and replaces is not null"

_MAKE_ROOM = f"""
    update vector_store_files
    set replaces = $1, vector_store_id = null, batch_id = null, bytes = 0, status = 'completed', work = 'delete'
    where vector_store_id = $2 and number =
        (select replaces from vector_store_files where {_IS_REPLACEMENT} and status = 'completed')
"""
"""Takes a file out of its vector store, whose replacement ``$1`` is read."""

_INHERIT = f"""
    update vector_store_files set
        batch_id = (select batch_id from vector_store_files as old where old.number = vector_store_files.replaces),
        attributes = (select attributes from vector_store_files as old where old.number = vector_store_files.replaces)
    where {_IS_REPLACEMENT} and status = 'completed'
"""

_INHERIT_ATTRIBUTES = """
    update vector_store_attributes set file = $1
    where file = (select number from vector_store_files where replaces = $1)
"""

_TAKE_PLACE = f"""
    update vector_store_files set vector_store_id = $2, replaces = null
    where {_IS_REPLACEMENT} and exists (select 1 from vector_store_files as old where old.replaces = $1)
"""

_LEFT_OVER = f"update vector_store_files set work = 'delete', replaces = null where {_IS_REPLACEMENT}"
"""Deletes a replacement whose place is gone; that of one that has taken its place is null by now."""

_FAIL_REPLACED = """
    update vector_store_files set status = 'failed', error = $2
    where number = (select replaces from vector_store_files where number = $1 and status = 'failed')
"""

_ADD_ATTRIBUTE = """
    insert into vector_store_attributes (file, name, words, number, flag)
    select number, cast($3 as text), $4, cast($5 as double precision), cast($6 as bigint)
    from vector_store_files where vector_store_id = $1 and file_id = $2
"""

_DELETE_ATTRIBUTES = """
    delete from vector_store_attributes
    where file in (select number from vector_store_files where vector_store_id = $1 and file_id = $2)
"""

_SET_ATTRIBUTES = """
    update vector_store_files set attributes = $4 where vector_store_id = $1 and file_id = $2 and owner = $3
"""

_FILE = f"""
    select {_FILE_COLUMNS} from vector_store_files where vector_store_id = $1 and file_id = $2 and owner = $3
"""

LEAVE_ALL = """
    update vector_store_files set vector_store_id = null, batch_id = null, bytes = 0, work = 'delete'
    where file_id = $1 and vector_store_id is not null and not exists (select 1 from files where files.id = $1)
"""
"""Takes a file that was deleted out of all vector stores."""

_GONE = f"""
    select distinct file_id from vector_store_files
    where vector_store_id is not null
    and not exists (select 1 from files where files.id = file_id and (expires_at is null or expires_at > $1))
    limit {BATCH}
"""

_LEAVE_GONE = """
    update vector_store_files set vector_store_id = null, batch_id = null, bytes = 0, work = 'delete'
    where file_id = $1 and vector_store_id is not null
"""

_EXPIRED = f"""
    select id from vector_stores
    where expires_days is not null and active_at + expires_days * {_DAY} < $1
    and exists (select 1 from vector_store_files where vector_store_id = vector_stores.id) limit {BATCH}
"""

_ADD_BATCH = """
    insert into vector_store_batches (id, vector_store_id, created_at, is_cancelled)
    select cast($1 as text), id, cast($3 as double precision), 0 from vector_stores where id = $2
"""

_BATCH = """
    select batches.created_at, is_cancelled from vector_store_batches as batches
    join vector_stores on vector_stores.id = batches.vector_store_id
    where batches.id = $1 and vector_store_id = $2 and owner = $3
"""

_CANCEL_BATCH = "update vector_store_batches set is_cancelled = 1 where id = $1 and vector_store_id = $2"

_CANCEL_REPLACEMENTS = """
    update vector_store_files set work = 'delete', replaces = null
    where replaces in (
        select number from vector_store_files where batch_id = $1 and vector_store_id = $2 and status = 'in_progress'
    )
"""

_CANCEL_REPLACED = """
    update vector_store_files set status = 'cancelled'
    where batch_id = $1 and vector_store_id = $2 and status = 'in_progress' and (work is null or work = 'clear')
"""

_CANCEL_FILES = """
    update vector_store_files set status = 'cancelled', work = 'clear'
    where batch_id = $1 and vector_store_id = $2 and work = 'read'
"""

# Work

_FREE = f"(server_id is null or server_id = $1 or {of_dead_server('vector_store_files')})"

_WAITING = f"""
    select owner, number from (
        select owner, number, row_number() over (partition by owner order by number) as place
        from vector_store_files where work is not null and {_FREE}
    ) as waiting where place <= $3 order by place, number limit {BATCH}
"""

_CLAIM = f"update vector_store_files set server_id = $1 where number = $3 and work is not null and {_FREE}"

_STORE_OF_REPLACED = """
    coalesce(vector_store_id, (
        select old.vector_store_id from vector_store_files as old where old.number = vector_store_files.replaces
    ))
"""

_CLAIMED = f"""
    select owner, work, {_FILE_COLUMNS.replace("vector_store_id", _STORE_OF_REPLACED)} from vector_store_files
    where number = $1 and server_id = $2
"""

_READING = "from vector_store_files where number = $1 and server_id = $2 and work = 'read'"

_INDEXED = 3
"""About the bytes that a byte of a chunk takes on disk, with the index of its terms."""

_ADD_CHUNK = f"""
    insert into vector_store_chunks (number, text, fresh, terms)
    select cast($3 as bigint), cast($4 as text), cast($5 as bigint), cast($6 as text) {_READING}
"""

_ADD_VECTORS = f"""
    insert into vector_store_vectors (first, count, data)
    select cast($3 as bigint), cast($4 as bigint), $5 {_READING}
"""

_COMPLETE = """
    update vector_store_files
    set status = 'completed', work = null, server_id = null, bytes = $3, chunks = $4, error = null
    where number = $1 and server_id = $2 and work = 'read'
"""

_FAIL = """
    update vector_store_files set status = 'failed', work = 'clear', error = $3
    where number = $1 and server_id = $2 and work = 'read'
"""

_CLEARED = """
    update vector_store_files set work = null, server_id = null
    where number = $1 and server_id = $2 and work = 'clear'
"""

_DELETED = "delete from vector_store_files where number = $1 and server_id = $2 and work = 'delete'"

_FORGET_ATTRIBUTES = """
    delete from vector_store_attributes
    where file = $1 and not exists (select 1 from vector_store_files where number = $1)
"""

_RELEASE = "update vector_store_files set server_id = null where number = $1 and server_id = $2"

_LAST_CHUNK = "select max(number) from vector_store_chunks where number >= $1 and number < $2"

_DELETE_CHUNKS = "delete from vector_store_chunks where number >= $1 and number < $2"

_DELETE_VECTORS = "delete from vector_store_vectors where first >= $1 and first < $2"

_VECTORS = f"""
    select files.number, count, data from vector_store_files as files
    join vector_store_vectors on first >= files.number << {PLACES} and first < (files.number + 1) << {PLACES}
    where files.number in ({{numbers}}) order by first
"""

_TEXTS = """
    select text, fresh from vector_store_chunks where number >= $1 and number < $2 order by number
"""


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
        return None if self.expires_days is None else self.active_at + self.expires_days * _DAY

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


class StoredVectorStores:
    """The vector stores in the store."""

    def __init__(self, context: StoreContext) -> None:
        self.context = context

    # Vector stores

    async def create(self, store_id: str, owner: str, name: str, metadata: Mapping[str, str], days: int | None) -> None:
        """Store a new vector store, which expires ``days`` days after its last use, if ever."""
        row = (store_id, owner, rows.to_json(name), rows.to_json(metadata), time.time(), days)
        await self.context.writer.carry_out([Statement(_CREATE, row)], store_id)

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
        sql = f"select {_STORE_COLUMNS} from vector_stores where owner = $1 and id in ({placeholders(len(names), 2)})"
        return await self._counted(await self.context.read(sql, owner, *names))

    async def page(self, owner: str, page: Page) -> tuple[Sequence[StoredVectorStore], bool]:
        """Return a page of vector stores, and True if there are more; raises `LookupError` for an unknown id."""
        read, has_more = await self._page("vector_stores", "id", _STORE_COLUMNS, page, {"owner": owner})
        return await self._counted(read), has_more

    async def update(
        self, store_id: str, owner: str, name: str, metadata: Mapping[str, str], days: int | None
    ) -> StoredVectorStore | None:
        """Change a vector store, and return it; None if there is none."""
        changed = Statement(_UPDATE, (store_id, owner, rows.to_json(name), rows.to_json(metadata), days))
        await self.context.writer.carry_out([changed], store_id)
        return await self.get(store_id, owner)

    async def touch(self, store_id: str, owner: str) -> None:
        """Note that a vector store is used, if that was not noted just now."""
        now = time.time()
        await self.context.writer.carry_out([Statement(_TOUCH, (store_id, owner, now, now - _FRESH_SECONDS))], store_id)

    async def delete(self, store_id: str, owner: str) -> bool:
        """Delete a vector store durably; False if there is none.  The server deletes the chunks afterwards."""
        if not rows.can_exist(store_id):
            return False
        left = [Statement(sql, (store_id,)) for sql in (_ORPHANED, _DELETE_BATCHES)]
        deleted = Statement(_DELETE, (store_id, owner))
        return (await self.context.writer.carry_out([deleted, *left], store_id))[0] > 0

    # Files

    async def add(self, store_id: str, files: Sequence[NewFile], batch_id: str | None = None) -> None:
        """Put files into a vector store that exists, to be read.

        A file that is there already is read again, and found as before until then.
        """
        now = time.time()
        made = [Statement(_ADD_BATCH, (batch_id, store_id, now))] if batch_id else []
        await self.context.writer.carry_out(
            [*made, *(statement for file in files for statement in _added(store_id, file, batch_id, now))], store_id
        )

    async def file(self, store_id: str, owner: str, file_id: str) -> VectorStoreFile | None:
        """Return a file of a vector store; None if it is not there."""
        if not (rows.can_exist(store_id) and rows.can_exist(file_id)):
            return None
        for row in await self.context.read(_FILE, store_id, file_id, owner):
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
        read, has_more = await self._page("vector_store_files", "file_id", _FILE_COLUMNS, page, found)
        return [_file(row) for row in read], has_more

    async def set_attributes(self, store_id: str, owner: str, file_id: str, attributes: Attributes) -> bool:
        """Replace the attributes of a file; False if it is not in the vector store."""
        if not (rows.can_exist(store_id) and rows.can_exist(file_id)):
            return False
        changed = Statement(_SET_ATTRIBUTES, (store_id, file_id, owner, rows.to_json(attributes)))
        if not (await self.context.writer.carry_out([changed], store_id))[0]:
            return False
        await self.context.writer.carry_out(_attributed(store_id, file_id, attributes), store_id)
        return True

    async def remove(self, store_id: str, owner: str, file_id: str) -> bool:
        """Take a file out of a vector store; False if it is not there."""
        if not (rows.can_exist(store_id) and rows.can_exist(file_id)):
            return False
        left = Statement(f"{_LEAVE} and file_id = $2 and owner = $3", (store_id, file_id, owner))
        return (await self.context.writer.carry_out([left], store_id))[0] > 0

    async def texts(self, file: VectorStoreFile) -> Sequence[str]:
        """Return the text of a file in pieces."""
        read = await self.context.read(_TEXTS, *_numbers(file.number))
        return [text[fresh:] for text, fresh in read]

    # Search

    async def readable(self, store_id: str, filters: Mapping[str, Any] | None = None) -> str | None:
        """Return the numbers of the files that can be searched, and pass a filter, with commas between them."""
        arguments: list[Value] = [store_id]
        passing = f"and {condition(filters, arguments)}" if filters else ""
        sql = f"""
            select string_agg(cast(number as text), ',') from vector_store_files
            where vector_store_id = $1 and (status = 'completed' or chunks > 0) {passing}
        """
        ((numbers,),) = await self.context.read(sql, *arguments) or ((None,),)
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
            sql = f"""
                select {_FILE_COLUMNS} from vector_store_files
                where (vector_store_id is not null or replaces is not null) and number in ({names})
            """
            found.update((int(row[0]), _file(row)) for row in await self.context.read(sql, *some))
        return found

    async def chunk_texts(self, numbers: Iterable[int]) -> Mapping[int, str]:
        """Return the texts of these chunks."""
        found: dict[int, str] = {}
        for some in batches(numbers):
            sql = f"select number, text from vector_store_chunks where number in ({placeholders(len(some))})"
            found.update((int(number), str(text)) for number, text in await self.context.read(sql, *some))
        return found

    async def vectors(self, numbers: Sequence[int]) -> Mapping[int, NDArray[np.float32]]:
        """Return the vectors of the chunks of these files, one in each row; none of a file that was read without."""
        read = await self.context.read(_VECTORS.format(numbers=placeholders(len(numbers))), *numbers)
        return await apart(sum(map(size_of, read)) > LARGE, _vectors, numbers, read)

    # Batches

    async def batch(self, batch_id: str, store_id: str, owner: str) -> Batch | None:
        """Return a batch of files; None if there is none."""
        if not (rows.can_exist(store_id) and rows.can_exist(batch_id)):
            return None
        for created_at, is_cancelled in await self.context.read(_BATCH, batch_id, store_id, owner):
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
        steps = (_CANCEL_BATCH, _CANCEL_FILES, _CANCEL_REPLACEMENTS, _CANCEL_REPLACED)
        await self.context.writer.carry_out([Statement(sql, place) for sql in steps])

    # Work

    async def waiting(self, of_each: int) -> Sequence[tuple[str, int]]:
        """Return owners and numbers of files that wait for a server: the oldest of each owner, in turns."""
        read = await self.context.read(_WAITING, self.context.server_id, self.context.stale, of_each)
        return [(str(owner), int(number)) for owner, number in read]

    async def claim(self, number: int) -> Claimed | None:
        """Take over the work on a file; None if another server has done so, or if nothing is left to do."""
        own = self.context.server_id
        if not (await self.context.writer.carry_out([Statement(_CLAIM, (own, self.context.stale, number))]))[0]:
            return None
        for owner, work, *columns in await self.context.read(_CLAIMED, number, own):
            return Claimed(_file(columns), owner, work)
        return None

    async def append(self, number: int, first: int, chunks: Sequence[Chunk], vectors: bytes | None) -> bool:
        """Store the next chunks of a file, the first of them at a place; False if it is not to be read any more.

        Raises `DiskFull`.
        """
        own, at = self.context.server_id, (number << PLACES) + first
        added = [Statement(_ADD_CHUNK, (number, own, at + place, *chunk)) for place, chunk in enumerate(chunks)]
        if vectors is not None:
            added.append(Statement(_ADD_VECTORS, (number, own, at, len(chunks), vectors)))
        async with self.context.room_for(_INDEXED * sum(size_of(each.arguments) for each in added)):
            return (await self.context.writer.carry_out(added))[0] > 0

    async def complete(self, number: int, size: int, chunks: int, store_id: str = "") -> bool:
        """Have the chunks of a file found, and False if it is not to be read any more.

        A replacement takes the place in its vector store, with all that was set meanwhile for the file that was there.
        """
        completed = await self.context.writer.carry_out(
            [
                Statement(_COMPLETE, (number, self.context.server_id, size, chunks)),
                Statement(_INHERIT, (number,)),
                Statement(_MAKE_ROOM, (number, store_id)),
                Statement(_INHERIT_ATTRIBUTES, (number,)),
                Statement(_TAKE_PLACE, (number, store_id)),
                Statement(f"{_LEFT_OVER} and status = 'completed'", (number,)),
            ]
        )
        return completed[0] > 0

    async def fail(self, number: int, error: FileError) -> None:
        """Note why a file cannot be read; one that it should replace keeps its chunks."""
        why = rows.to_json(error)
        await self.context.writer.carry_out(
            [
                Statement(_FAIL, (number, self.context.server_id, why)),
                Statement(_FAIL_REPLACED, (number, why)),
                Statement(f"{_LEFT_OVER} and status = 'failed'", (number,)),
            ]
        )

    async def give_up(self, number: int) -> None:
        """Delete a file whose vector store is gone."""
        await self.context.writer.carry_out([Statement(_LEFT_OVER, (number,))])

    async def release(self, number: int) -> None:
        """Let any server go on with a file."""
        await self.context.writer.carry_out([Statement(_RELEASE, (number, self.context.server_id))])

    async def clear(self, number: int) -> None:
        """Delete all chunks of a file, some at a time."""
        first, end = _numbers(number)
        for (last,) in await self.context.read(_LAST_CHUNK, first, end):
            for at in range(first, (last or first - 1) + 1, BATCH):
                some = at, at + BATCH
                await self.context.writer.carry_out([Statement(_DELETE_CHUNKS, some), Statement(_DELETE_VECTORS, some)])

    async def cleared(self, number: int) -> None:
        """Note that a file has no chunks any more; one that has left its vector store is deleted."""
        own = (number, self.context.server_id)
        await self.context.writer.carry_out(
            [Statement(_CLEARED, own), Statement(_DELETED, own), Statement(_FORGET_ATTRIBUTES, (number,))]
        )

    async def sweep(self) -> None:
        """Empty the vector stores that have expired, and take files out that are deleted."""
        now = time.time()
        while ids := [name for (name,) in await self.context.read(_EXPIRED, now)]:
            await self.context.writer.carry_out([Statement(_LEAVE, (name,)) for name in ids])
        while ids := [name for (name,) in await self.context.read(_GONE, now)]:
            await self.context.writer.carry_out([Statement(_LEAVE_GONE, (name,)) for name in ids])

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
            sql = _COUNTS.format(column=column, names=placeholders(len(some)))
            for name, status, files, size, chunks in await self.context.read(sql, *some):
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
        sql = f"select {columns} from {table} where {where} order by number {order} limit {page.limit + 1}"
        read = await self.context.read(sql, *arguments)
        shown = read[: page.limit]
        return shown[::-1] if is_reversed else shown, len(read) > page.limit

    async def _place(self, table: str, key: str, cursor: str, where: str, arguments: Sequence[Value]) -> int:
        if rows.can_exist(cursor):
            sql = f"select number from {table} where {where} and {key} = ${len(arguments) + 1}"
            for (number,) in await self.context.read(sql, *arguments, cursor):
                return int(number)
        raise LookupError(cursor)


_TEXT = msgspec.json.Decoder(str)
_METADATA: msgspec.json.Decoder[Mapping[str, str]] = msgspec.json.Decoder(dict[str, str])
_ATTRIBUTES: msgspec.json.Decoder[Any] = msgspec.json.Decoder(dict[str, str | float | bool])
_ERROR = msgspec.json.Decoder(FileError)


def _added(store_id: str, file: NewFile, batch_id: str | None, now: float) -> Iterable[Statement]:
    place, chunking = (store_id, file.id), file.chunking or (None, None)
    attributes = None if file.attributes is None else rows.to_json(file.attributes)
    yield Statement(_GIVE_UP_REPLACEMENT, place)
    yield Statement(_ADD_AGAIN, (*place, batch_id, file.filename, attributes, *chunking))
    yield Statement(_ADD_REPLACEMENT, place)
    yield Statement(_ADD, (*place, batch_id, file.filename, now, attributes or "{}", *(file.chunking or Chunking())))
    if file.attributes is not None:
        yield from _attributed(*place, file.attributes)


def _attributed(store_id: str, file_id: str, attributes: Attributes) -> Sequence[Statement]:
    """Return the statements that write the attributes down for filters."""
    added = [Statement(_DELETE_ATTRIBUTES, (store_id, file_id))]
    for name, value in attributes.items():
        row = (store_id, file_id, rows.to_json(name), *columns_of(value))
        added.append(Statement(_ADD_ATTRIBUTE, row))
    return added


def _vectors(numbers: Sequence[int], read: Sequence[Row]) -> Mapping[int, NDArray[np.float32]]:
    parts = {number: list[NDArray[np.float32]]() for number in numbers}
    for number, count, data in read:
        parts[number].append(np.frombuffer(data, np.float32).reshape(int(count), -1))
    return {number: np.concatenate(some) if some else np.empty((0, 0), np.float32) for number, some in parts.items()}


def _numbers(file: int) -> tuple[int, int]:
    """Return the first number of a file's chunks, and the number after the last one."""
    return file << PLACES, (file + 1) << PLACES


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
