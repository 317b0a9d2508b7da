"""The Files API, in OpenAI's form and in Anthropic's: clients of the latter send the header of its dialect."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal
from urllib.parse import quote

import msgspec
from aiohttp import hdrs, web

from penstock.api.http.auth import OWNER
from penstock.api.http.bodies import Page, Problem
from penstock.api.http.conventions import api_of
from penstock.api.http.errors import INVALID, STREAMING, as_error, as_json, listed_as_json
from penstock.api.http.openapi import FORM, Operation, operation
from penstock.api.http.pagination import ends
from penstock.api.http.query import AnyText, Choice, Number
from penstock.api.limits.admission import Admission
from penstock.api.resources.resources import BASE, ServerParts
from penstock.extensions.tools.files.stored_files import StoredFile, StoredFiles, Upload
from penstock.extensions.tools.resources.upload_form import ANY_TYPE, UploadForm
from penstock.pipeline.errors import (
    BodyTooLarge,
    DiskFull,
    InvalidRequest,
    ServerBusy,
    StorageFull,
    StoredFileNotFound,
    StoreFailed,
    UnsupportedParameter,
)
from penstock.pipeline.protocol.params.files import UploadFile, UploadFileToAnthropic
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.validation import read_body
from penstock.services.file_names import plain_name
from penstock.services.slots import Slots
from penstock.services.store.store import Store

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 32
"""The most files that are uploaded at once; each has a piece in memory."""

ANTHROPIC = "messages"
"""The dialect whose clients get Anthropic's form."""

LIMIT = Number("limit", default=10_000, least=1, most=10_000, meaning="The most files of a page.")
ORDER = Choice("order", ("desc", "asc"), meaning="`desc` begins with the newest file, `asc` with the oldest.")
AFTER = AnyText("after", meaning="The id of the file after which the page begins.")
PURPOSE = AnyText("purpose", meaning="The purpose of the files to list.")

_PAGE_OF_ANTHROPIC = Number("limit", default=20, least=1, most=1_000, meaning=LIMIT.meaning)
_PLACES = ("page", "after_id", "before_id")
_MOST_IDS = 100
_OF_ANTHROPIC = (
    AnyText("page", meaning="Anthropic's: `next_page` of the page before."),
    AnyText("after_id", meaning="Anthropic's: the id of the file after which the page begins."),
    AnyText("before_id", meaning="Anthropic's: the id of the file before which the page ends."),
    AnyText("ids", meaning="Anthropic's: the ids of the files to list, up to 100."),
    AnyText("scope_id", meaning="Anthropic's: refused, as files here have no scopes."),
)
"""The parameters of a list of files that Anthropic's API alone has."""
_REFUSALS = (InvalidRequest, StoredFileNotFound, StoreFailed)


class FileObject(msgspec.Struct, frozen=True):
    """A stored file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None
    status: Literal["processed"] = "processed"
    status_details: None = None
    object: Literal["file"] = "file"

    @classmethod
    def of(cls, file: StoredFile) -> FileObject:
        """Return a file in OpenAI's form."""
        expires_at = None if file.expires_at is None else int(file.expires_at)
        return cls(
            file.id,
            bytes=file.bytes,
            created_at=int(file.created_at),
            filename=file.filename,
            purpose=file.purpose,
            expires_at=expires_at,
        )


class FileList(Page[FileObject], frozen=True):
    """One page of a list of files."""


class DeletedFile(msgspec.Struct, frozen=True):
    """The confirmation that a file was deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class FileMetadata(msgspec.Struct, frozen=True):
    """A stored file, in Anthropic's form."""

    id: str
    created_at: str
    filename: str
    mime_type: str
    size_bytes: int
    expires_at: str | None
    downloadable: Literal[True] = True
    type: Literal["file"] = "file"

    @classmethod
    def of(cls, file: StoredFile) -> FileMetadata:
        """Return a file in Anthropic's form."""
        media_type = file.media_type.partition(";")[0]
        expires_at = None if file.expires_at is None else _iso(file.expires_at)
        return cls(
            file.id,
            created_at=_iso(file.created_at),
            filename=file.filename,
            mime_type=media_type,
            size_bytes=file.bytes,
            expires_at=expires_at,
        )


class FileMetadataList(msgspec.Struct, frozen=True):
    """One page of a list of files, in Anthropic's form; ``next_page`` asks for the next one."""

    data: tuple[FileMetadata, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool
    next_page: str | None


class DeletedFileId(msgspec.Struct, frozen=True):
    """The confirmation that a file was deleted, in Anthropic's form."""

    id: str
    type: Literal["file_deleted"] = "file_deleted"


@dataclass(frozen=True)
class _Form:
    """The form of an API: the fields of an upload, a file, and the confirmation that one was deleted."""

    upload: type[UploadFile | UploadFileToAnthropic]
    file: Callable[[StoredFile], FileObject | FileMetadata]
    deleted: Callable[[str], DeletedFile | DeletedFileId]


_OPENAI = _Form(UploadFile, FileObject.of, DeletedFile)
_ANTHROPIC = _Form(UploadFileToAnthropic, FileMetadata.of, DeletedFileId)


@asynccontextmanager
async def files(parts: ServerParts) -> AsyncGenerator[Sequence[web.RouteDef], None]:
    """Open the Files API for the length of a block."""
    scheduler = parts.scheduler
    yield Files(scheduler.store, scheduler.admission, parts.settings.max_upload_bytes).routes(BASE)


@dataclass
class Files:
    """The Files API over the files of a store, each of at most ``most`` bytes."""

    store: Store
    admission: Admission
    most: int
    places: Slots = field(default_factory=lambda: Slots(MOST_AT_ONCE, per_owner=-(-MOST_AT_ONCE // 2)), init=False)

    @property
    def files(self) -> StoredFiles:
        """The files in the store."""
        return self.store.part(StoredFiles)

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Return the routes under ``base``."""
        one = f"{base}/files/{{file_id}}"
        return (
            web.post(f"{base}/files", self.upload),
            web.get(f"{base}/files", self.list_files),
            web.get(one, self.retrieve),
            web.delete(one, self.delete),
            web.get(f"{one}/content", self.download),
        )

    @operation(
        Operation(
            FileObject,
            body=UploadFile,
            body_type=FORM,
            refusals=(InvalidRequest, BodyTooLarge, StorageFull, StoreFailed, DiskFull),
        )
    )
    async def upload(self, request: web.Request) -> web.Response:
        """Upload a file."""
        self.store.check_keeps("files")
        owner, form = request[OWNER], UploadForm(request, self.most)
        await self.admission.storing(owner, self.store, request.content_length or 1)
        api = _form_of(request)
        with self.turn(owner):
            uploading = self.files.uploading(owner, size=request.content_length or 0)
            async with uploading as upload, self.counting(owner, upload) as write:
                await form.receive(write)
                asked = read_body(msgspec.json.encode(form.fields), api.upload)
                expires_at = None if asked.lasts is None else upload.created_at + asked.lasts
                file = await upload.finish(plain_name(asked.file), asked.purpose, form.media_type, expires_at)
        return as_json(api.file(file))

    @operation(Operation(FileList, query=(PURPOSE, LIMIT, ORDER, AFTER, *_OF_ANTHROPIC), refusals=_REFUSALS))
    async def list_files(self, request: web.Request) -> web.Response:
        """List the files, page by page."""
        self.store.check_keeps("files")
        if _is_anthropic(request):
            return as_json(await self._page_of_anthropic(request))
        limit = LIMIT.read(request)
        found = await self.files.page(
            request[OWNER],
            limit=limit + 1,
            after=AFTER.read(request),
            newest_first=ORDER.read(request) == "desc",
            purpose=PURPOSE.read(request),
        )
        data = tuple(FileObject.of(file) for file in found[:limit])
        return await listed_as_json(FileList(data, *ends(data), len(found) > limit), "data")

    async def _page_of_anthropic(self, request: web.Request) -> FileMetadataList:
        """Return the page that a client of Anthropic's API asks for, in the form of the old or of the new SDKs."""
        owner, limit = request[OWNER], _PAGE_OF_ANTHROPIC.read(request)
        if ids := [*request.query.getall("ids", ()), *request.query.getall("ids[]", ())]:
            return await self._named(owner, ids)
        places = [name for name in _PLACES if name in request.query]
        if "scope_id" in request.query:
            raise UnsupportedParameter("The files of this server have no scopes.", param="scope_id")
        if len(places) > 1:
            raise InvalidRequest(f"Send one of {', '.join(_PLACES)}.", param=places[1])
        place = request.query[places[0]].removeprefix("page_") if places else None
        is_back = places == ["before_id"]
        try:
            found = await self.files.page(owner, limit=limit + 1, after=place, newest_first=not is_back)
        except StoredFileNotFound as error:
            error.param = places[0]
            raise
        data = tuple(FileMetadata.of(file) for file in found[:limit])
        data, has_more = data[::-1] if is_back else data, len(found) > limit
        return FileMetadataList(data, *ends(data), has_more, f"page_{data[-1].id}" if has_more else None)

    async def _named(self, owner: str, ids: Sequence[str]) -> FileMetadataList:
        names = dict.fromkeys(ids)
        if len(names) > _MOST_IDS:
            raise InvalidRequest(f"ids may have {_MOST_IDS} entries.", param="ids")
        data = tuple([FileMetadata.of(file) for name in names if (file := await self.files.get(name, owner))])
        return FileMetadataList(data, *ends(data), has_more=False, next_page=None)

    @operation(Operation(FileObject, refusals=_REFUSALS))
    async def retrieve(self, request: web.Request) -> web.Response:
        """Retrieve a file without its content."""
        file = await self._found(request)
        return as_json(_form_of(request).file(file))

    @operation(Operation(DeletedFile, refusals=_REFUSALS))
    async def delete(self, request: web.Request) -> web.Response:
        """Delete a file."""
        self.store.check_keeps("files")
        file_id = request.match_info["file_id"]
        if not await self.files.delete(file_id, request[OWNER]):
            raise StoredFileNotFound(shortened(file_id))
        return as_json(_form_of(request).deleted(file_id))

    @operation(Operation(bytes, answer_type=ANY_TYPE, refusals=_REFUSALS))
    async def download(self, request: web.Request) -> web.StreamResponse:
        """Retrieve the content of a file, or a range of its bytes."""
        file = await self._found(request)
        is_head = request.method == hdrs.METH_HEAD  # for which ranges are not defined
        start, end = (0, file.bytes) if is_head else _range(request, file)
        is_part = (start, end) != (0, file.bytes)
        if is_part and start >= end:
            problem = Problem("The file has no such bytes.", INVALID, "Range", None)
            refused = as_error(416, problem, request)
            refused.headers[hdrs.CONTENT_RANGE] = f"bytes */{file.bytes}"
            return refused
        answer = web.StreamResponse(status=206 if is_part else 200, headers=_headers(file))
        answer.content_length = end - start
        if is_part:
            answer.headers[hdrs.CONTENT_RANGE] = f"bytes {start}-{end - 1}/{file.bytes}"
        if is_head:
            return answer
        request[STREAMING] = True
        await answer.prepare(request)
        try:
            async for chunk in self.files.chunks(file, start, end):
                await answer.write(chunk)
        except (StoredFileNotFound, StoreFailed) as error:
            logger.warning("The download of %s broke off: %s", file.id, error)
            if request.transport is not None:
                request.transport.close()  # its client could not tell otherwise
            return answer
        await answer.write_eof()
        return answer

    async def _found(self, request: web.Request) -> StoredFile:
        self.store.check_keeps("files")
        file_id = request.match_info["file_id"]
        if (file := await self.files.get(file_id, request[OWNER])) is None:
            raise StoredFileNotFound(shortened(file_id))
        return file

    @asynccontextmanager
    async def counting(self, owner: str, upload: Upload) -> AsyncGenerator[Callable[[bytes], Awaitable[None]], None]:
        """Yield a function that writes to an upload and counts its bytes for an owner, unless it is given up."""

        async def write(piece: bytes) -> None:
            await self.admission.storing(owner, self.store, len(piece))
            await upload.write(piece)
            self.admission.stored(owner, len(piece))

        try:
            yield write
        finally:
            if not upload.is_finished:
                self.admission.stored(owner, -upload.received)

    @contextmanager
    def turn(self, owner: str) -> Iterator[None]:
        """Take one of the places for files on their way for the length of a block; raises `ServerBusy`."""
        if not self.places.acquire_now(owner):
            raise ServerBusy("Too many files are being uploaded. Try again in a moment.")
        try:
            yield
        finally:
            self.places.release(owner)


def _is_anthropic(request: web.Request) -> bool:
    return api_of(request) == ANTHROPIC


def _form_of(request: web.Request) -> _Form:
    return _ANTHROPIC if _is_anthropic(request) else _OPENAI


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _etag(file: StoredFile) -> str:
    return f'"{file.sha256}"'


def _headers(file: StoredFile) -> dict[str, str]:
    """Return the headers of a download: a browser saves it under its name, and runs nothing of it."""
    plain = re.sub(r'[^ -~]|["\\%]', "_", file.filename)
    return {
        hdrs.CONTENT_TYPE: file.media_type,
        hdrs.CONTENT_DISPOSITION: f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(file.filename, safe='')}",
        hdrs.ACCEPT_RANGES: "bytes",
        hdrs.ETAG: _etag(file),
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "sandbox",
    }


def _range(request: web.Request, file: StoredFile) -> tuple[int, int]:
    """Return the first byte that a request asks for, and the one after the last.

    That is the whole file for a range of no known form, and for one of another file, by its ``If-Range``.
    """
    size = file.bytes
    if request.headers.get(hdrs.IF_RANGE, _etag(file)) != _etag(file):
        return 0, size
    try:
        asked = request.http_range
    except ValueError:
        return 0, size
    start, end, _ = asked.indices(size)
    if asked.start is not None and asked.start >= size:
        return size, size
    return start, end
