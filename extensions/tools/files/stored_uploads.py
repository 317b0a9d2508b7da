"""StoredUploads: files that clients send in parts, of which any server of the store takes the next one.

The parts are files that only their upload finds.  They are copied into the file in the order that the client names, and
deleted after that; those of an upload that is never completed expire with it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from hashlib import md5
from typing import Literal, TypeAlias

import msgspec

from penstock.extensions.tools.files.stored_files import StoredFile, StoredFiles
from penstock.services.store import rows
from penstock.services.store.database import BATCH, Statement, placeholders
from penstock.services.store.parts import StorePart

LASTS = 3_600.0
"""Seconds in which an upload must be completed."""

REMEMBERED = 86_400.0
"""Seconds for which an upload is known after that, so that a client that comes late reads why it is refused."""

_TABLES = (
    """
    create table uploads (
        id text primary key,
        owner text not null,
        filename text not null,
        purpose text not null,
        media_type text not null,
        size bigint not null,
        lasts bigint,
        created_at double precision not null,
        expires_at double precision not null,
        status text not null,
        file_id text
    )
    """,
    "create index uploads_expiring on uploads (expires_at)",
)
"""The uploads, each with the size that its client declares, and the seconds that its file lasts."""

_COLUMNS = "id, filename, purpose, media_type, size, lasts, created_at, expires_at, status, file_id"

_CREATE = f"insert into uploads (owner, {_COLUMNS}) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"

_GET = f"select {_COLUMNS} from uploads where owner = $1 and id = $2"

_CANCEL = "update uploads set status = 'cancelled' where id = $1 and status = 'pending'"

_COMPLETE = "update uploads set status = 'completed', file_id = $2 where id = $1 and status = 'pending'"

_ONLY_ONCE = """
    delete from files where id = $2 and not exists (select 1 from uploads where id = $1 and file_id = $2)
"""
"""Deletes a file if another request makes one of the same upload in the same moment."""

_FIND_OLD = f"select id from uploads where expires_at <= $1 limit {BATCH}"


State: TypeAlias = Literal["pending", "completed", "cancelled", "expired"]


class StoredUpload(msgspec.Struct, frozen=True):
    """A file that arrives in parts; times are in seconds since 1970."""

    id: str
    filename: str
    purpose: str
    media_type: str
    size: int
    """The bytes that its client declares."""
    lasts: int | None
    """Seconds after which its file is deleted; None if that stays."""
    created_at: float
    expires_at: float
    status: Literal["pending", "completed", "cancelled"]
    file_id: str | None

    @property
    def state(self) -> State:
        """The status that a client is shown: a pending one expires."""
        return "expired" if self.status == "pending" and self.expires_at <= time.time() else self.status


class StoredUploads(StorePart):
    """The uploads in the store."""

    name = "uploads"
    tables = _TABLES

    async def create(
        self, owner: str, *, filename: str, purpose: str, media_type: str, size: int, lasts: int | None
    ) -> StoredUpload:
        """Begin an upload; raises `StoreFailed`."""
        now = time.time()
        upload = StoredUpload(
            f"upload_{secrets.token_hex(16)}",
            filename=filename,
            purpose=purpose,
            media_type=media_type,
            size=size,
            lasts=lasts,
            created_at=now,
            expires_at=now + LASTS,
            status="pending",
            file_id=None,
        )
        await self.context.writer.carry_out([Statement(_CREATE, (owner, *msgspec.structs.astuple(upload)))], upload.id)
        return upload

    async def get(self, upload_id: str, owner: str) -> StoredUpload | None:
        """Return the upload; None if there is none."""
        if not rows.can_exist(upload_id):
            return None
        for row in await self.context.read(_GET, owner, upload_id):
            return StoredUpload(*row)
        return None

    async def cancel(self, upload: StoredUpload) -> None:
        """Cancel an upload, unless it has ended already; raises `StoreFailed`."""
        await self.context.writer.carry_out([Statement(_CANCEL, (upload.id,))], upload.id)

    async def complete(
        self, files: StoredFiles, upload: StoredUpload, owner: str, parts: Sequence[StoredFile], checksum: str | None
    ) -> bool:
        """Make a file of the parts in this order; False if they have another MD5 than the ``checksum``.

        Of several requests for it, one makes the file.  Raises `StoreFailed`.
        """
        digest = md5(usedforsecurity=False)
        async with files.uploading(owner, size=upload.size) as made:
            async for chunk in _chunks(files, parts):
                await asyncio.to_thread(digest.update, chunk)
                await made.write(chunk)
            if checksum is not None and digest.hexdigest() != checksum.lower():
                return False
            both = upload.id, made.id
            await made.finish(
                upload.filename,
                upload.purpose,
                upload.media_type,
                None if upload.lasts is None else made.created_at + upload.lasts,
                also=(Statement(_COMPLETE, both), Statement(_ONLY_ONCE, both)),
            )
        return True

    async def sweep(self) -> None:
        """Forget the uploads that are over for a day; their parts are files that have expired."""
        before = time.time() - REMEMBERED
        while ids := [name for (name,) in await self.context.read(_FIND_OLD, before)]:
            named = f"delete from uploads where id in ({placeholders(len(ids))})"
            await self.context.writer.carry_out([Statement(named, tuple(ids))])


async def _chunks(files: StoredFiles, parts: Sequence[StoredFile]) -> AsyncIterator[bytes]:
    for part in parts:
        async for chunk in files.chunks(part):
            yield chunk
