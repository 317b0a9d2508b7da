"""StoredFiles: the files that clients upload, each with an owner, in chunks.

A file is not found until its upload is finished.  Its row then names the server that receives it, so that the sweep of
any server deletes the uploads of those that have died.  The row goes first when a file is deleted, and its chunks in
steps, so that no writer waits long; the sweep also deletes chunks that are left without a row.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import sha256

import msgspec

from penstock.extensions.tools.search.tables import LEAVE_ALL
from penstock.pipeline.errors import StoredFileNotFound, StoreFailed
from penstock.pipeline.tasks import LARGE_BYTES, apart
from penstock.services.store import rows
from penstock.services.store.database import BATCH, Row, Statement, batches, placeholders
from penstock.services.store.heartbeats import of_dead_server
from penstock.services.store.parts import StorePart
from penstock.services.store.writer import StoreContext

CHUNK = 512 << 10
"""Bytes of a chunk: the cost of a durable commit is small beside it, and other changes wait for it briefly."""

_STEP = 4 << 20
"""Bytes of the chunks that are deleted in one transaction."""

_TABLES = (
    """
    create table files (
        id text primary key,
        owner text not null,
        filename text not null,
        purpose text not null,
        media_type text not null,
        bytes bigint not null,
        created_at double precision not null,
        expires_at double precision,
        sha256 text not null,
        server_id text
    )
    """,
    "create index files_of_owner on files (owner, created_at, id)",
    "create index files_bytes on files (owner, bytes)",
    "create index files_expiring on files (expires_at) where expires_at is not null",
    "create index files_received on files (server_id) where server_id is not null",
    """
    create table file_chunks (
        file_id text not null,
        start bigint not null,
        data bytea not null,
        primary key (file_id, start)
    )
    """,
    "alter table files add column upload_id text",
    "create index files_of_upload on files (upload_id) where upload_id is not null",
)
"""The uploaded files, and their bytes from ``start`` on; a server that still receives a file is named.

A part of an upload is a file that only its upload finds.
"""

_COLUMNS = "id, filename, purpose, media_type, bytes, created_at, expires_at, sha256"

_BEGIN = """
    insert into files (id, owner, filename, purpose, media_type, bytes, created_at, sha256, server_id, upload_id)
    values ($1, $2, '', '', '', 0, $3, '', $4, $5)
"""

_GROW = "update files set bytes = bytes + $2 where id = $1 and server_id = $3"

_APPEND = """
    insert into file_chunks (file_id, start, data)
    select id, cast($2 as bigint), $3 from files where id = $1 and server_id = $4
"""

_FINISH = """
    update files set filename = $2, purpose = $3, media_type = $4, expires_at = $5, sha256 = $6, server_id = null
    where id = $1 and server_id = $7
"""

_WHOLE = "owner = $1 and server_id is null and (expires_at is null or expires_at > cast($2 as double precision))"

_FOUND = f"{_WHOLE} and upload_id is null"

_GET = f"select {_COLUMNS} from files where {_FOUND} and id = $3"

_PAGE = """
    select {columns} from files
    where {found} and (purpose = $3 or cast($3 as text) is null) {after}
    order by created_at {order}, id {order} limit $4
"""

_CHUNK = "select start, data from file_chunks where file_id = $1 and start <= $2 order by start desc limit 1"

_PARTS = f"select {_COLUMNS} from files where {_WHOLE} and upload_id = $3"

_DELETE = f"delete from files where {_FOUND} and id = $3"

_ABANDONED = f"server_id is not null and server_id <> $1 and {of_dead_server('files')}"

_FIND_ABANDONED = f"select id, bytes from files where {_ABANDONED} limit {BATCH}"

_FIND_EXPIRED = f"select id from files where expires_at <= $1 limit {BATCH}"

_WITHOUT_ROW = f"""
    select file_id, max(start) from file_chunks
    where not exists (select 1 from files where files.id = file_id) group by file_id limit {BATCH}
"""


_FORGET = "delete from files where id = $1"
"""Deletes a file whose upload broke off."""

_CLEAR = """
    delete from file_chunks
    where file_id = $1 and start < $2 and not exists (select 1 from files where files.id = file_id)
"""
"""Deletes chunks of a file that has no row."""


class StoredFile(msgspec.Struct, frozen=True):
    """A file without its content; times are in seconds since 1970."""

    id: str
    filename: str
    purpose: str
    media_type: str
    """The type that its sender declares."""
    bytes: int
    created_at: float
    expires_at: float | None
    sha256: str


class Upload:
    """A file on its way into the store."""

    def __init__(self, context: StoreContext, created_at: float, prefix: str = "file-") -> None:
        self.id = f"{prefix}{secrets.token_hex(16)}"
        self.received = 0
        """The bytes so far."""
        self.created_at = created_at
        self.is_finished = False
        self._context = context
        self._buffer = bytearray()
        self._digest = sha256()

    async def write(self, data: bytes) -> None:
        """Append bytes, which are durable in chunks; raises `StoreFailed`."""
        self._buffer += data
        self.received += len(data)
        while len(self._buffer) >= CHUNK:
            chunk = bytes(self._buffer[:CHUNK])
            del self._buffer[:CHUNK]
            await self._append(chunk, self.received - len(self._buffer) - len(chunk))

    async def finish(
        self,
        filename: str,
        purpose: str,
        media_type: str = "application/octet-stream",
        expires_at: float | None = None,
        *,
        also: Sequence[Statement] = (),
    ) -> StoredFile:
        """Make the file visible, durably, and return it; raises `StoreFailed`.

        What the statements of ``also`` change is changed in the same moment.
        """
        if self._buffer:
            await self._append(bytes(self._buffer), self.received - len(self._buffer))
        digest = self._digest.hexdigest()
        end = (self.id, filename, purpose, media_type, expires_at, digest, self._context.server_id)
        await self._write(Statement(_FINISH, end), *also)
        self.is_finished = True
        return StoredFile(
            self.id,
            filename=filename,
            purpose=purpose,
            media_type=media_type,
            bytes=self.received,
            created_at=self.created_at,
            expires_at=expires_at,
            sha256=digest,
        )

    async def _append(self, chunk: bytes, start: int) -> None:
        await asyncio.to_thread(self._digest.update, chunk)
        own = self._context.server_id
        grown = Statement(_GROW, (self.id, len(chunk), own))
        async with self._context.room_for(len(chunk)):
            await self._write(grown, Statement(_APPEND, (self.id, start, chunk, own)))

    async def _write(self, *statements: Statement) -> None:
        counts = await self._context.writer.carry_out(statements, self.id)
        if not counts[0]:  # this server has looked dead to another one
            raise StoreFailed("The upload was given up. Try again.")


class StoredFiles(StorePart):
    """The files in the store."""

    name = "files"
    tables = _TABLES
    queued = (_FORGET, _CLEAR)
    counted = ("files",)

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self._clearing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def uploading(
        self, owner: str, created_at: float | None = None, size: int = 0, upload_id: str | None = None
    ) -> AsyncGenerator[Upload, None]:
        """Receive a new file for the length of a block; nothing is left of it unless the block finishes it.

        With an ``upload_id`` it is a part of that upload, which `parts` alone returns.
        Raises `DiskFull` if there is no room for the ``size`` that its sender declares.
        """
        async with self.context.room_for(size):
            pass
        created_at = time.time() if created_at is None else created_at
        upload = Upload(self.context, created_at, "file-" if upload_id is None else "part_")
        row = (upload.id, owner, upload.created_at, self.context.server_id, upload_id)
        try:
            await self.context.writer.carry_out([Statement(_BEGIN, row)], upload.id)
            yield upload
        finally:
            if not upload.is_finished:
                self._withdraw(upload)

    def _withdraw(self, upload: Upload) -> None:
        """Delete an upload, also if the outcome of its last commit is unknown, without a wait for the store."""
        with suppress(StoreFailed):  # a sweep deletes it
            forgotten = self.context.writer.queue([Statement(_FORGET, (upload.id,))], upload.id)
            self._begin_clearing(upload.id, upload.received, forgotten)

    async def get(self, file_id: str, owner: str) -> StoredFile | None:
        """Return the file; None if there is none."""
        if not rows.can_exist(file_id):
            return None
        for row in await self.context.read(_GET, owner, time.time(), file_id):
            return _file(row)
        return None

    async def parts(self, upload_id: str, owner: str) -> dict[str, StoredFile]:
        """Return the parts of an upload by their ids."""
        return {row[0]: _file(row) for row in await self.context.read(_PARTS, owner, time.time(), upload_id)}

    async def delete_parts(self, parts: Mapping[str, StoredFile]) -> None:
        """Delete parts of an upload durably."""
        for some in batches(parts):
            deleted = f"delete from files where upload_id is not null and id in ({placeholders(len(some))})"
            await self._forget([Statement(deleted, tuple(some))], {name: parts[name].bytes for name in some})

    async def page(
        self, owner: str, *, limit: int, after: str | None = None, newest_first: bool = True, purpose: str | None = None
    ) -> Sequence[StoredFile]:
        """Return up to ``limit`` files that follow the file ``after`` in the order of their upload, or from the start.

        Raises `StoredFileNotFound` if there is no such file.
        """
        if purpose is not None and not rows.can_exist(purpose):
            return ()
        place: tuple[float, str] | tuple[()] = ()
        if after is not None:
            if (file := await self.get(after, owner)) is None:
                raise StoredFileNotFound(after, param="after")
            place = file.created_at, file.id
        sign, order = ("<", "desc") if newest_first else (">", "asc")
        follows = f"and (created_at, id) {sign} ($5, $6)" if place else ""
        sql = _PAGE.format(columns=_COLUMNS, found=_FOUND, after=follows, order=order)
        return [_file(row) for row in await self.context.read(sql, owner, time.time(), purpose, limit, *place)]

    async def chunks(self, file: StoredFile, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes of a file from ``start`` to ``end``; raises `StoredFileNotFound` once it is deleted."""
        at, end = start, file.bytes if end is None else min(end, file.bytes)
        while at < end:
            found = await self.context.read(_CHUNK, file.id, at)
            piece = b"".join(bytes(data[at - begin : end - begin]) for begin, data in found)
            if not piece:
                raise StoredFileNotFound(file.id)
            at += len(piece)
            yield piece

    async def content(self, file: StoredFile) -> bytes:
        """Return the bytes of a file; raises `StoredFileNotFound` once it is deleted."""
        pieces = [piece async for piece in self.chunks(file)]
        return await apart(file.bytes > LARGE_BYTES, b"".join, pieces)

    async def delete(self, file_id: str, owner: str) -> bool:
        """Delete a file durably, also from all vector stores; False if there is none."""
        if (file := await self.get(file_id, owner)) is None:
            return False
        deleted = Statement(_DELETE, (owner, time.time(), file_id))
        return await self._forget([deleted, Statement(LEAVE_ALL, (file_id,))], {file_id: file.bytes}) > 0

    async def has_file(self, file_id: str, owner: str) -> bool:
        return await self.get(file_id, owner) is not None

    async def recover(self) -> None:
        """Delete the unfinished uploads of dead servers; raises `StoreFailed`."""
        dead = (self.context.server_id, self.context.stale)
        while found := await self.context.read(_FIND_ABANDONED, *dead):
            sizes = {str(file_id): int(size) for file_id, size in found}
            named = f"delete from files where {_ABANDONED} and id in ({placeholders(len(sizes), 3)})"
            if not await self._forget([Statement(named, (*dead, *sizes))], sizes):
                break

    async def _forget(self, statements: Sequence[Statement], sizes: Mapping[str, int]) -> int:
        """Delete the rows of files of these sizes, and then their chunks; return the number of rows.

        The chunks go also if the outcome of the commit is unknown: they stay while there is a row.
        """
        try:
            return (await self.context.writer.carry_out(statements, *sizes))[0]
        finally:
            for file_id, size in sizes.items():
                self._begin_clearing(file_id, size)

    async def sweep(self) -> None:
        """Delete expired files, the unfinished uploads of dead servers, and chunks without a file."""
        await self.recover()
        now = time.time()
        while ids := [name for (name,) in await self.context.read(_FIND_EXPIRED, now)]:
            named = f"delete from files where expires_at <= $1 and id in ({placeholders(len(ids), 2)})"
            if not (await self.context.writer.carry_out([Statement(named, (now, *ids))]))[0]:
                break
        while left := await self.context.read(_WITHOUT_ROW):
            for name, last in left:
                await self._clear(name, last)
            if len(left) < BATCH:
                break

    def _begin_clearing(self, file_id: str, size: int, forgotten: asyncio.Future[None] | None = None) -> None:
        task = asyncio.create_task(self._cleared(file_id, size, forgotten))
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)

    async def _cleared(self, file_id: str, size: int, forgotten: asyncio.Future[None] | None) -> None:
        with suppress(StoreFailed):  # a sweep deletes the rest
            if forgotten is not None:
                await asyncio.shield(forgotten)  # the writer sets it, also if this task is cancelled
            await self._clear(file_id, size)

    async def _clear(self, file_id: str, size: int) -> None:
        """Delete the chunks of a file that has no row any more, of which none begins behind its size.

        An outage, such as that of a full disk, delays the deletion, and does not leave it to the next sweep.
        """
        for start in range(0, size + 1, _STEP):
            await asyncio.shield(self.context.writer.queue([Statement(_CLEAR, (file_id, start + _STEP))]))


def _file(row: Row) -> StoredFile:
    return StoredFile(*row)
