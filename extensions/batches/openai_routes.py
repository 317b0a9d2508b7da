"""OpenAI's Batch API: a file of requests in, files of results out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from penstock.api.http.auth import OWNER, team_of, title_of
from penstock.api.http.errors import as_json, listed_as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.pagination import AFTER, LIMIT, ends
from penstock.api.http.request_body import off_loop, receive
from penstock.api.resources.resources import BASE
from penstock.extensions.batches.batch import StoredBatch
from penstock.extensions.batches.openai_form import WINDOW, BatchList, BatchObject, CreateBatch
from penstock.extensions.batches.room import Room
from penstock.pipeline.errors import (
    BatchNotFound,
    BatchOver,
    DiskFull,
    InvalidRequest,
    LimitReached,
    StorageFull,
    StoreFailed,
)
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.validation import read_body

_API: Final = "openai"
_REFUSALS = (InvalidRequest, BatchNotFound, StoreFailed)


def openai_routes(room: Room) -> Sequence[web.RouteDef]:
    """Return the routes of OpenAI's Batch API."""
    return _Routes(room).routes(BASE)


@dataclass(frozen=True)
class _Routes:
    room: Room

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        one = f"{base}/batches/{{batch_id}}"
        return (
            web.post(f"{base}/batches", self.create),
            web.get(f"{base}/batches", self.list_batches),
            web.get(one, self.retrieve),
            web.post(f"{one}/cancel", self.cancel),
        )

    @operation(
        Operation(
            BatchObject, body=CreateBatch, refusals=(InvalidRequest, LimitReached, StorageFull, DiskFull, StoreFailed)
        )
    )
    async def create(self, request: web.Request) -> web.Response:
        """Create a batch of the requests in a file."""
        self.room.check_store()
        owner, asked = request[OWNER], await off_loop(read_body, await receive(request), CreateBatch)
        if asked.endpoint not in self.room.paths:
            supported = ", ".join(map(repr, sorted(self.room.paths)))
            message = f"Invalid value: {shortened(asked.endpoint)!r}. Supported values are: {supported}."
            raise InvalidRequest(message, param="endpoint", code="invalid_value")
        await self._check_room(owner, asked.input_file_id)
        now = time.time()
        batch = StoredBatch(
            id=f"batch_{secrets.token_hex(16)}",
            owner=owner,
            api=_API,
            endpoint=asked.endpoint,
            created_at=now,
            expires_at=now + WINDOW,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            metadata=asked.metadata,
            output_expires_after=asked.output_expires_after.seconds if asked.output_expires_after else None,
            key_name=title_of(request),
            team=team_of(request),
        )
        async with self.room.bounds.within(owner, 0, batches=1):
            await self.room.stored.create(batch)
        self.room.runner.wake()
        return as_json(BatchObject.of(batch))

    @operation(Operation(BatchList, query=(LIMIT, AFTER), refusals=_REFUSALS))
    async def list_batches(self, request: web.Request) -> web.Response:
        """List the batches, the newest first, page by page."""
        self.room.check_store()
        limit, after = LIMIT.read(request), AFTER.read(request)
        found = await self.room.stored.page(request[OWNER], _API, limit=limit + 1, after=after)
        if found is None:
            raise BatchNotFound(shortened(after or ""), param="after")
        data = tuple(map(BatchObject.of, found[:limit]))
        return await listed_as_json(BatchList(data, *ends(data), len(found) > limit), "data")

    @operation(Operation(BatchObject, refusals=_REFUSALS))
    async def retrieve(self, request: web.Request) -> web.Response:
        """Retrieve a batch."""
        return as_json(BatchObject.of(await self._found(request)))

    @operation(Operation(BatchObject, refusals=(*_REFUSALS, BatchOver)))
    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel a batch: requests that run may end, and the others are left out."""
        batch = await self._found(request)
        if not batch.has_ended:
            batch = await self.room.stored.cancel(batch.id, request[OWNER]) or batch
            self.room.runner.wake()
        if batch.status not in ("cancelling", "cancelled"):
            raise BatchOver(batch.status)
        return as_json(BatchObject.of(batch))

    async def _found(self, request: web.Request) -> StoredBatch:
        return await self.room.found(request, "batch_id", _API)

    async def _check_room(self, owner: str, file_id: str) -> None:
        """Raise `StorageFull` or `DiskFull` if there is no room for the lines; the validation finds a file missing."""
        scheduler = self.room.parts.scheduler
        shelf = scheduler.store.files
        if shelf is not None and (file := await shelf.get(file_id, owner)) is not None:
            await scheduler.admission.storing(owner, scheduler.store, file.bytes)
            await scheduler.store.check_room(file.bytes)
