"""The Uploads API: a large file in parts, which a client sends again one by one where its connection breaks off."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import msgspec
from aiohttp import web

from penstock.api.http.auth import OWNER
from penstock.api.http.errors import as_json
from penstock.api.http.openapi import FORM, Operation, operation
from penstock.api.http.request_body import off_loop, receive
from penstock.api.resources.resources import BASE, ServerParts
from penstock.extensions.tools.files.stored_files import StoredFile
from penstock.extensions.tools.files.stored_uploads import State, StoredUpload, StoredUploads
from penstock.extensions.tools.resources.files import FileObject, Files
from penstock.extensions.tools.resources.upload_form import UploadForm, media_type_of
from penstock.pipeline.errors import (
    BodyTooLarge,
    DiskFull,
    InvalidRequest,
    StorageFull,
    StoredFileNotFound,
    StoreFailed,
    UploadNotFound,
)
from penstock.pipeline.protocol.params.files import MOST_PARTS, CompleteUpload, CreateUpload, UploadPart
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.validation import read_body
from penstock.services.file_names import plain_name

PART = 64 << 20
"""Bytes that a part may have."""

_REFUSALS = (InvalidRequest, UploadNotFound, StoreFailed)
_STORING = (*_REFUSALS, BodyTooLarge, StorageFull, DiskFull)


class UploadObject(msgspec.Struct, frozen=True):
    """A file that arrives in parts."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: State
    file: FileObject | None = None
    object: Literal["upload"] = "upload"


class UploadPartObject(msgspec.Struct, frozen=True):
    """A part of an upload."""

    id: str
    created_at: int
    upload_id: str
    object: Literal["upload.part"] = "upload.part"


@asynccontextmanager
async def uploads(parts: ServerParts) -> AsyncGenerator[Sequence[web.RouteDef], None]:
    """Open the Uploads API for the length of a block."""
    scheduler = parts.scheduler
    files = Files(scheduler.store, scheduler.admission, parts.settings.max_upload_bytes)
    yield Uploads(files).routes(BASE)


@dataclass(frozen=True)
class Uploads:
    """The Uploads API, which makes files of the Files API."""

    files: Files

    @property
    def uploads(self) -> StoredUploads:
        """The uploads in the store."""
        return self.files.store.part(StoredUploads)

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Return the routes under ``base``."""
        one = f"{base}/uploads/{{upload_id}}"
        return (
            web.post(f"{base}/uploads", self.create),
            web.post(f"{one}/parts", self.add_part),
            web.post(f"{one}/complete", self.complete),
            web.post(f"{one}/cancel", self.cancel),
        )

    @operation(Operation(UploadObject, body=CreateUpload, refusals=(InvalidRequest, StorageFull, StoreFailed)))
    async def create(self, request: web.Request) -> web.Response:
        """Begin an upload."""
        self.files.store.check_keeps("files")
        owner, most = request[OWNER], self.files.most
        asked = await off_loop(read_body, await receive(request), CreateUpload)
        if asked.bytes > most:
            message = f"A file may have {most} bytes here: the operator sets --max-upload-bytes."
            raise InvalidRequest(message, param="bytes", code="integer_above_max_value")
        await self.files.admission.storing(owner, self.files.store, asked.bytes)
        upload = await self.uploads.create(
            owner,
            filename=plain_name(asked.filename),
            purpose=asked.purpose,
            media_type=media_type_of(asked.mime_type),
            size=asked.bytes,
            lasts=asked.lasts,
        )
        return as_json(_shown(upload))

    @operation(Operation(UploadPartObject, body=UploadPart, body_type=FORM, refusals=_STORING))
    async def add_part(self, request: web.Request) -> web.Response:
        """Add a part to an upload."""
        owner, upload = request[OWNER], await self._pending(request)
        stored = (await self.files.files.parts(upload.id, owner)).values()
        if len(stored) >= MOST_PARTS or sum(part.bytes for part in stored) > 2 * upload.size:
            message = f"The upload has {len(stored)} parts, with {sum(part.bytes for part in stored)} bytes: cancel it."
            raise InvalidRequest(message, param="data")  # a client may repeat each part, not send them for ever
        form = UploadForm(request, min(PART, upload.size), "data")
        with self.files.turn(owner):
            size = request.content_length or 0
            await self.files.admission.storing(owner, self.files.store, size or 1)
            uploading = self.files.files.uploading(owner, size=size, upload_id=upload.id)
            async with uploading as part, self.files.counting(owner, part) as write:
                await form.receive(write)
                read_body(msgspec.json.encode(form.fields), UploadPart)
                made = await part.finish("", upload.purpose, expires_at=upload.expires_at)
        return as_json(UploadPartObject(made.id, created_at=int(made.created_at), upload_id=upload.id))

    @operation(Operation(UploadObject, body=CompleteUpload, refusals=_STORING))
    async def complete(self, request: web.Request) -> web.Response:
        """Make a file of the parts of an upload, in the order of their ids."""
        owner = request[OWNER]
        asked = await off_loop(read_body, await receive(request), CompleteUpload)
        upload = await self._found(request)
        if upload.state == "completed":
            return await self._completed(upload, owner)
        _check_pending(upload)
        stored = await self.files.files.parts(upload.id, owner)
        with self.files.turn(owner):
            try:
                chosen = _chosen(upload, stored, asked)
                is_right = await self.uploads.complete(self.files.files, upload, owner, chosen, asked.md5)
            except (InvalidRequest, StoredFileNotFound):  # another request may have ended it, and deletes its parts
                if (await self._found(request)).state == "pending":
                    raise
                is_right = True
            if not is_right:
                message = "The MD5 of the parts is another one. Send the part again that has changed on its way."
                raise InvalidRequest(message, param="md5", code="invalid_value")
        await self.files.files.delete_parts(stored)
        if (upload := await self._found(request)).state != "completed":
            _check_pending(upload)
        return await self._completed(upload, owner)

    @operation(Operation(UploadObject, refusals=_REFUSALS))
    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel an upload, and delete its parts."""
        upload = await self._found(request)
        if upload.state != "cancelled":
            _check_pending(upload)
            await self.uploads.cancel(upload)
            await self.files.files.delete_parts(await self.files.files.parts(upload.id, request[OWNER]))
        return as_json(_shown(await self._found(request)))

    async def _completed(self, upload: StoredUpload, owner: str) -> web.Response:
        file = None if upload.file_id is None else await self.files.files.get(upload.file_id, owner)
        return as_json(_shown(upload, file))

    async def _pending(self, request: web.Request) -> StoredUpload:
        upload = await self._found(request)
        _check_pending(upload)
        return upload

    async def _found(self, request: web.Request) -> StoredUpload:
        self.files.store.check_keeps("files")
        upload_id = request.match_info["upload_id"]
        if (upload := await self.uploads.get(upload_id, request[OWNER])) is None:
            raise UploadNotFound(shortened(upload_id))
        return upload


def _check_pending(upload: StoredUpload) -> None:
    if upload.state != "pending":
        raise InvalidRequest(f"The upload {upload.id!r} is {upload.state}. Begin another one.", param="upload_id")


def _chosen(upload: StoredUpload, stored: dict[str, StoredFile], asked: CompleteUpload) -> list[StoredFile]:
    """Return the parts that a client names, in its order; raises `InvalidRequest` if they are not the whole file."""
    names = asked.part_ids
    for position, name in enumerate(names):
        if name not in stored:
            raise InvalidRequest(f"The upload has no part {shortened(name)!r}.", param=f"part_ids[{position}]")
    if len(set(names)) < len(names):
        raise InvalidRequest("A part is named twice.", param="part_ids")
    chosen = [stored[name] for name in names]
    if (size := sum(part.bytes for part in chosen)) != upload.size:
        message = f"The parts have {size} bytes, and the upload was declared with {upload.size}."
        raise InvalidRequest(message, param="part_ids")
    return chosen


def _shown(upload: StoredUpload, file: StoredFile | None = None) -> UploadObject:
    return UploadObject(
        upload.id,
        bytes=upload.size,
        created_at=int(upload.created_at),
        expires_at=int(upload.expires_at),
        filename=upload.filename,
        purpose=upload.purpose,
        status=upload.state,
        file=None if file is None else FileObject.of(file),
    )
