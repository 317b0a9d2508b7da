"""The Containers API: containers, and the files in their folders.

The server that made a container answers for it: another one passes the request on to it (see `Peers.follow`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from mimetypes import guess_type
from typing import Any, Literal
from urllib.parse import quote

import msgspec
from aiohttp import hdrs, web

from penstock.api.http.auth import OWNER
from penstock.api.http.bodies import Page
from penstock.api.http.errors import STREAMING, as_json, listed_as_json
from penstock.api.http.openapi import FORM, Operation, operation
from penstock.api.http.pagination import AFTER, LIMIT, ORDER, ends
from penstock.api.http.query import AnyText
from penstock.api.http.request_body import off_loop, receive
from penstock.api.limits.admission import PAUSE
from penstock.api.resources.resources import BASE, ServerParts
from penstock.extensions.tools.files.stored_files import StoredFiles
from penstock.extensions.tools.resources.upload_form import ANY_TYPE, UploadForm
from penstock.extensions.tools.sandbox.stored_containers import StoredContainers
from penstock.pipeline import errors
from penstock.pipeline.protocol.params.containers import AddContainerFile, CreateContainer, UploadContainerFile
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.validation import read_body
from penstock.services.containers import (
    HOME,
    Containers,
    Described,
    FolderFull,
    FoundFile,
    LiveContainer,
    MemoryLimit,
    NoSuchFile,
    Recorded,
    TooManyContainers,
    file_id,
)
from penstock.services.file_names import plain_name
from penstock.services.store.store import Store
from penstock.stages.normalize.containers import check_memory
from penstock.stages.normalize.recall import draw_suffix

MOST_LISTED = 1_000
"""Containers of a list, those that have ended among them."""

NAME = AnyText("name", meaning="The name of the containers to list.")

_REFUSALS = (errors.InvalidRequest, errors.ContainerNotFound, errors.ServerUnreachable, errors.StoreFailed)
_FILE_REFUSALS = (*_REFUSALS, errors.ContainerFileNotFound)


class ContainerObject(msgspec.Struct, frozen=True):
    """A container."""

    id: str
    created_at: int
    name: str
    status: Literal["running", "expired"]
    last_active_at: int
    expires_after: dict[str, Any]
    memory_limit: MemoryLimit | None
    network_policy: dict[str, Any]
    object: Literal["container"] = "container"

    @classmethod
    def of(cls, described: Described) -> ContainerObject:
        """Return the object of a container."""
        one = described
        return cls(
            one.id,
            created_at=int(one.created_at),
            name=one.name,
            status="running" if one.is_live else "expired",
            last_active_at=int(one.last_active_at),
            expires_after={"anchor": "last_active_at", "minutes": max(1, round(one.ttl / 60))},
            memory_limit=one.memory_limit,
            network_policy={"type": "disabled"},
        )


class ContainerList(Page[ContainerObject], frozen=True):
    """One page of a list of containers."""


class DeletedContainer(msgspec.Struct, frozen=True):
    """The confirmation that a container was deleted, with its files."""

    id: str
    object: Literal["container.deleted"] = "container.deleted"
    deleted: Literal[True] = True


class ContainerFile(msgspec.Struct, frozen=True):
    """A file of a container."""

    id: str
    bytes: int
    container_id: str
    created_at: int
    path: str
    source: Literal["user", "assistant"]
    object: Literal["container.file"] = "container.file"

    @classmethod
    def of(cls, container: LiveContainer, file: FoundFile) -> ContainerFile:
        """Return the object of a file of a container."""
        name = container.described.id
        return cls(
            file_id(name, file.path),
            bytes=file.size,
            container_id=name,
            created_at=file.changed_at // 10**9,
            path=f"{HOME}/{file.path}",
            source="user" if file.path in container.uploaded else "assistant",
        )


class ContainerFileList(Page[ContainerFile], frozen=True):
    """One page of a list of files of a container."""


class DeletedContainerFile(msgspec.Struct, frozen=True):
    """The confirmation that a file of a container was deleted."""

    id: str
    object: Literal["container.file.deleted"] = "container.file.deleted"
    deleted: Literal[True] = True


@asynccontextmanager
async def resource(parts: ServerParts) -> AsyncGenerator[Sequence[web.RouteDef], None]:
    """Open the Containers API for the length of a block."""
    yield ContainerRoutes(parts.tools.containers, parts.scheduler.store).routes(BASE)


@dataclass(frozen=True)
class ContainerRoutes:
    """The Containers API over the containers of this server, and the store that knows those of the others."""

    containers: Containers | None
    store: Store
    draw: Callable[[], str] = draw_suffix

    @property
    def files(self) -> StoredFiles:
        """The files in the store."""
        return self.store.part(StoredFiles)

    @property
    def ledger(self) -> StoredContainers:
        """The containers of all servers of the store."""
        return self.store.part(StoredContainers)

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Return the routes under ``base``."""
        one = f"{base}/containers/{{container_id}}"
        file = f"{one}/files/{{file_id}}"
        return (
            web.post(f"{base}/containers", self.create),
            web.get(f"{base}/containers", self.list_containers),
            web.get(one, self.retrieve),
            web.delete(one, self.delete),
            web.post(f"{one}/files", self.add_file),
            web.get(f"{one}/files", self.list_files),
            web.get(file, self.retrieve_file),
            web.delete(file, self.delete_file),
            web.get(f"{file}/content", self.download),
        )

    @operation(Operation(ContainerObject, body=CreateContainer, refusals=(*_REFUSALS, errors.LimitReached)))
    async def create(self, request: web.Request) -> web.Response:
        """Create a container."""
        containers, owner = self._offered(), request[OWNER]
        asked = await off_loop(read_body, await receive(request), CreateContainer)
        ttl = asked.expires_after.minutes * 60.0 if asked.expires_after else containers.ttl
        if ttl > containers.ttl and asked.expires_after:
            message = f"A container lasts {containers.ttl / 60:g} minutes here: its operator sets --container-ttl."
            raise errors.InvalidRequest(message, param="expires_after.minutes", code="integer_above_max_value")
        check_memory(asked.memory_limit, containers, "memory_limit")
        for position, name in enumerate(asked.file_ids or ()):
            if await self.files.get(name, owner) is None:
                raise errors.StoredFileNotFound(shortened(name), param=f"file_ids[{position}]")
        container_id = f"cntr_{self.draw()}"
        try:
            container = await containers.create(container_id, owner, asked.name, ttl, asked.memory_limit)
        except TooManyContainers:
            message = "All containers that this API key may have are in use. Delete one, or try again later."
            raise errors.LimitReached(message, PAUSE) from None
        try:
            async with containers.used(container):
                await containers.place(container, asked.file_ids or ())
        except FolderFull:
            await containers.end(container)
            raise _full("file_ids") from None
        return as_json(ContainerObject.of(container.described))

    @operation(Operation(ContainerList, query=(LIMIT, ORDER, AFTER, NAME), refusals=_REFUSALS))
    async def list_containers(self, request: web.Request) -> web.Response:
        """List the containers, page by page; those that have ended are in the list for a day."""
        containers, owner = self._offered(), request[OWNER]
        known = {each.described.id: each.described for each in await self.ledger.of(owner, MOST_LISTED)}
        known |= {each.described.id: each.described for each in containers.of(owner)}
        name = NAME.read(request)
        found = [each for each in known.values() if name in (None, each.name)]
        found.sort(key=lambda each: (each.created_at, each.id), reverse=ORDER.read(request) == "desc")
        page, has_more = _page(request, found, lambda each: each.id)
        data = tuple(map(ContainerObject.of, page))
        return await listed_as_json(ContainerList(data, *ends(data), has_more), "data")

    @operation(Operation(ContainerObject, refusals=_REFUSALS))
    async def retrieve(self, request: web.Request) -> web.Response:
        """Retrieve a container, also one that has expired."""
        found = await self._known(request)
        return as_json(ContainerObject.of(found.described))

    @operation(Operation(DeletedContainer, refusals=_REFUSALS))
    async def delete(self, request: web.Request) -> web.Response:
        """Delete a container with its files; the calls that run in it fail."""
        found = await self._known(request)
        if not isinstance(found, Recorded):
            await self._offered().end(found)
        await self.ledger.forget(found.described.id, request[OWNER])
        return as_json(DeletedContainer(found.described.id))

    @operation(
        Operation(
            ContainerFile,
            body=AddContainerFile,
            form=UploadContainerFile,
            refusals=(*_FILE_REFUSALS, errors.BodyTooLarge, errors.StoredFileNotFound),
        )
    )
    async def add_file(self, request: web.Request) -> web.Response:
        """Put a file into the folder of a container: one in a form, or a stored one."""
        containers, container = self._offered(), await self._found(request)
        async with containers.used(container):
            try:
                if request.content_type == FORM:
                    form = UploadForm(request, containers.largest_file)
                    async with container.uploading() as upload:
                        await form.receive(upload.write)
                        sent = read_body(msgspec.json.encode(form.fields), UploadContainerFile)
                        file = await upload.finish(plain_name(sent.file))
                else:
                    asked = await off_loop(read_body, await receive(request), AddContainerFile)
                    stored = await self.files.get(asked.file_id, request[OWNER])
                    if stored is None:
                        raise errors.StoredFileNotFound(shortened(asked.file_id))
                    async with container.uploading() as upload:
                        async for piece in self.files.chunks(stored):
                            await upload.write(piece)
                        file = await upload.finish(plain_name(stored.filename))
            except FolderFull:
                raise _full("file") from None
        return as_json(ContainerFile.of(container, file))

    @operation(Operation(ContainerFileList, query=(LIMIT, ORDER, AFTER), refusals=_FILE_REFUSALS))
    async def list_files(self, request: web.Request) -> web.Response:
        """List the files in the folder of a container, page by page."""
        container = await self._found(request)
        found = [ContainerFile.of(container, file) for file in await container.files()]
        found.sort(key=lambda each: (each.created_at, each.path), reverse=ORDER.read(request) == "desc")
        page, has_more = _page(request, found, lambda each: each.id)
        return await listed_as_json(ContainerFileList(tuple(page), *ends(page), has_more), "data")

    @operation(Operation(ContainerFile, refusals=_FILE_REFUSALS))
    async def retrieve_file(self, request: web.Request) -> web.Response:
        """Retrieve a file of a container without its content."""
        container = await self._found(request)
        return as_json(ContainerFile.of(container, await _file(container, request)))

    @operation(Operation(DeletedContainerFile, refusals=_FILE_REFUSALS))
    async def delete_file(self, request: web.Request) -> web.Response:
        """Delete a file of a container."""
        container = await self._found(request)
        try:
            await container.delete((await _file(container, request)).path)
        except NoSuchFile:
            raise _no_file(request) from None
        return as_json(DeletedContainerFile(request.match_info["file_id"]))

    @operation(Operation(bytes, answer_type=ANY_TYPE, refusals=_FILE_REFUSALS))
    async def download(self, request: web.Request) -> web.StreamResponse:
        """Retrieve the content of a file of a container."""
        container = await self._found(request)
        file = await _file(container, request)
        async with self._offered().used(container), aclosing(container.content(file.path)) as content:
            try:
                first = await anext(content, b"")
            except NoSuchFile:
                raise _no_file(request) from None
            answer = web.StreamResponse(headers=_headers(file))
            if request.method == hdrs.METH_HEAD:
                return answer
            request[STREAMING] = True
            await answer.prepare(request)
            await answer.write(first)
            async for piece in content:
                await answer.write(piece)
            await answer.write_eof()
            return answer

    def _offered(self) -> Containers:
        if self.containers is None or not self.containers.are_offered:
            raise errors.UnsupportedParameter("This server has no containers: no sandbox works here, or --no-sandbox.")
        return self.containers

    async def _known(self, request: web.Request) -> LiveContainer | Recorded:
        """Return the container that the path names, or its record if it has ended.

        Raises `ContainerElsewhere` if another server has it.
        """
        name, owner = request.match_info["container_id"], request[OWNER]
        if container := self._offered().get(name, owner):
            return container
        recorded = (await self.ledger.find([name], owner)).get(name)
        if recorded is None:
            raise errors.ContainerNotFound(shortened(name))
        if recorded.described.is_live and recorded.server_id != self.store.server_id:
            raise errors.ContainerElsewhere(shortened(name), recorded.url, param="container_id")
        return recorded

    async def _found(self, request: web.Request) -> LiveContainer:
        found = await self._known(request)
        if isinstance(found, Recorded):
            raise errors.ContainerNotFound(shortened(found.described.id))
        return found


async def _file(container: LiveContainer, request: web.Request) -> FoundFile:
    """Return the file that the path names."""
    wanted, name = request.match_info["file_id"], container.described.id
    for file in await container.files():
        if file_id(name, file.path) == wanted:
            return file
    raise _no_file(request)


def _no_file(request: web.Request) -> errors.ContainerFileNotFound:
    return errors.ContainerFileNotFound(shortened(request.match_info["file_id"]))


def _full(param: str) -> errors.InvalidRequest:
    return errors.InvalidRequest("The container has no room for this file, or not for its name.", param=param)


def _headers(file: FoundFile) -> dict[str, str]:
    """Return headers with which no browser runs what is in a file."""
    name = file.path.rpartition("/")[2]
    return {
        "Content-Type": guess_type(name)[0] or ANY_TYPE,
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }


def _page(request: web.Request, found: Sequence[Any], name_of: Callable[[Any], str]) -> tuple[Sequence[Any], bool]:
    """Return the page of a list that a request asks for, and True if there is more."""
    limit, after = LIMIT.read(request), AFTER.read(request)
    start = 0
    if after is not None:
        names = [name_of(each) for each in found]
        if after not in names:
            raise errors.InvalidRequest(f"There is no {shortened(after)!r} in this list.", param="after")
        start = names.index(after) + 1
    return found[start : start + limit], len(found) > start + limit
