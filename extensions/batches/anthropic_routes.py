"""The routes of Anthropic's batches, whose results are read from the rows of their lines."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from aiohttp import hdrs, web

from penstock.api.http.auth import OWNER, team_of, title_of
from penstock.api.http.conventions import of_dialect
from penstock.api.http.errors import STREAMING, as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.pagination import ends
from penstock.api.http.query import AnyText, Number
from penstock.api.http.request_body import off_loop, receive, release
from penstock.extensions.batches.anthropic_form import (
    BatchedMessage,
    CreateMessageBatch,
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchList,
    line_of,
    read_requests,
    result_lines,
)
from penstock.extensions.batches.batch import NewLine, StoredBatch
from penstock.extensions.batches.errors import GivenUp
from penstock.extensions.batches.room import Room
from penstock.pipeline.errors import (
    BatchNotFound,
    DiskFull,
    InvalidRequest,
    LimitReached,
    StorageFull,
    StoreFailed,
)
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.tasks import in_thread, let_go, shielded

logger = logging.getLogger(__name__)

BASE: Final = "/v1/messages/batches"
"""The URL of Anthropic's batches."""

ENDPOINT: Final = "/v1/messages"
"""The path to which each request of a batch goes."""

LASTS: Final = 24 * 3600.0
"""Seconds after its creation at which a batch expires."""

SLICE: Final = 500
"""Lines that are written or read at once."""

JSON_LINES: Final = "application/x-jsonl"

LIMIT: Final = Number("limit", default=20, least=1, most=1000, meaning="The most batches of a page.")
AFTER: Final = AnyText("after_id", meaning="The id of the batch after which the page begins: an older one.")
BEFORE: Final = AnyText("before_id", meaning="The id of the batch before which the page ends: newer ones.")

_LOOKING: Final = (InvalidRequest, BatchNotFound, StoreFailed)
_of_messages: Final = of_dialect("messages")


def anthropic_routes(room: Room) -> Sequence[web.RouteDef]:
    """Return the routes of Anthropic's batches."""
    return MessageBatches(room).routes(BASE)


@dataclass(frozen=True)
class MessageBatches:
    """Anthropic's batches over those of the store."""

    room: Room

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Return the routes under ``base``."""
        one = f"{base}/{{message_batch_id}}"
        return (
            web.post(base, self.create),
            web.get(base, self.list_batches),
            web.get(one, self.retrieve),
            web.delete(one, self.delete),
            web.post(f"{one}/cancel", self.cancel),
            web.get(f"{one}/results", self.results),
        )

    @_of_messages
    @operation(
        Operation(
            MessageBatch,
            body=CreateMessageBatch,
            refusals=(InvalidRequest, LimitReached, StorageFull, DiskFull, StoreFailed),
        )
    )
    async def create(self, request: web.Request) -> web.Response:
        """Create a batch of messages, which begins at once."""
        self.room.check_store()
        body = await receive(request)
        size, owner = len(body), request[OWNER]
        requests = await off_loop(read_requests, body)
        del body
        scheduler = self.room.parts.scheduler
        await scheduler.admission.storing(owner, scheduler.store, size)
        await scheduler.store.check_room(size)
        now = time.time()
        batch = StoredBatch(
            id=f"msgbatch_{uuid4().hex[:24]}",
            owner=owner,
            api="anthropic",
            endpoint=ENDPOINT,
            created_at=now,
            expires_at=now + LASTS,
            total=len(requests),
            key_name=title_of(request),
            team=team_of(request),
        )
        async with self._creating(batch):
            for start in range(0, len(requests), SLICE):
                lines = await in_thread(self._lines, requests[start : start + SLICE], start + 1)
                await self.room.stored.add_lines(batch.id, lines)
            await self.room.stored.begin(batch.id)
        scheduler.admission.stored(owner, size)
        release(request)
        let_go(requests)
        self.room.runner.wake()
        return await self._now(batch)

    @asynccontextmanager
    async def _creating(self, batch: StoredBatch) -> AsyncGenerator[None, None]:
        """Create a batch for the length of a block that adds its lines; if it fails, the batch does not stay."""
        works = self.room.runner.works
        works.creating.add(batch.id)
        try:
            async with self.room.bounds.within(batch.owner, batch.total, batches=1):
                await self.room.stored.create(batch)
            yield
        except BaseException as error:
            with suppress(StoreFailed, GivenUp):  # then a work of this server, or of another one, deletes it
                await shielded(works.give_up(batch))
            if isinstance(error, GivenUp):
                raise StoreFailed(
                    "The batch was not created: another server took it for lost. Send it again."
                ) from error
            raise
        finally:
            works.creating.discard(batch.id)

    def _lines(self, requests: Sequence[BatchedMessage], first: int) -> list[NewLine]:
        served = self.room.parts.scheduler.served
        return [line_of(request, number, served) for number, request in enumerate(requests, first)]

    @_of_messages
    @operation(Operation(MessageBatchList, query=(LIMIT, AFTER, BEFORE), refusals=_LOOKING))
    async def list_batches(self, request: web.Request) -> web.Response:
        """List the batches of messages, the newest first, page by page."""
        self.room.check_store()
        owner, limit, after, before = request[OWNER], LIMIT.read(request), AFTER.read(request), BEFORE.read(request)
        if after is not None and before is not None:
            raise InvalidRequest("Send one of after_id, before_id.", param="before_id")
        found = await self.room.stored.page(owner, "anthropic", limit=limit + 1, after=after, before=before)
        if found is None:
            named = AFTER.name if before is None else BEFORE.name
            raise BatchNotFound(shortened(after or before or ""), param=named)
        has_more = len(found) > limit
        page = found[1:] if has_more and before is not None else found[:limit]
        data = tuple([_form(batch) for batch in page])
        return as_json(MessageBatchList(data, *ends(data), has_more))

    @_of_messages
    @operation(Operation(MessageBatch, refusals=_LOOKING))
    async def retrieve(self, request: web.Request) -> web.Response:
        """Retrieve a batch of messages."""
        return _shown(await self._found(request))

    @_of_messages
    @operation(Operation(MessageBatch, refusals=_LOOKING))
    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel a batch of messages: those that run may still end."""
        batch = await self._found(request)
        if batch.has_ended:
            raise InvalidRequest(f"The batch {batch.id} has ended: it cannot be canceled.", code="batch_ended")
        await self.room.stored.cancel(batch.id, batch.owner)
        self.room.runner.wake()
        return await self._now(batch)

    @_of_messages
    @operation(Operation(DeletedMessageBatch, refusals=_LOOKING))
    async def delete(self, request: web.Request) -> web.Response:
        """Delete a batch of messages that has ended, with its results."""
        batch = await self._found(request)
        if not batch.has_ended:
            message = f"The batch {batch.id} has not ended: cancel it first, and delete it when it has ended."
            raise InvalidRequest(message, code="batch_not_ended")
        if not await self.room.stored.delete(batch.id, batch.owner):
            raise BatchNotFound(batch.id)
        return as_json(DeletedMessageBatch(batch.id))

    @_of_messages
    @operation(Operation(bytes, answer_type=JSON_LINES, refusals=_LOOKING))
    async def results(self, request: web.Request) -> web.StreamResponse:
        """Retrieve the results of a batch of messages that has ended, one in each line."""
        batch = await self._found(request)
        if not batch.has_ended:
            message = f"The batch {batch.id} has no results until its processing_status is ended."
            raise InvalidRequest(message, code="batch_not_ended")
        answer = web.StreamResponse(headers={hdrs.CONTENT_TYPE: JSON_LINES, "X-Content-Type-Options": "nosniff"})
        if request.method == hdrs.METH_HEAD:
            return answer
        request[STREAMING] = True
        await answer.prepare(request)
        after = 0
        try:
            while some := await self.room.stored.results(batch.id, after, SLICE):
                after = some[-1][0].number
                await answer.write(await in_thread(result_lines, some))
        except StoreFailed as error:
            logger.warning("The results of %s broke off: %s", batch.id, error)
            if request.transport is not None:
                request.transport.close()  # its client could not tell otherwise
            return answer
        await answer.write_eof()
        return answer

    async def _found(self, request: web.Request) -> StoredBatch:
        return await self.room.found(request, "message_batch_id", "anthropic")

    async def _now(self, batch: StoredBatch) -> web.Response:
        """Show a batch as it is now."""
        now = await self.room.stored.get(batch.id, batch.owner)
        if now is None:
            raise BatchNotFound(batch.id, param="message_batch_id")
        return _shown(now)


def _form(batch: StoredBatch) -> MessageBatch:
    return MessageBatch.of(batch, f"{BASE}/{batch.id}/results")


def _shown(batch: StoredBatch) -> web.Response:
    return as_json(_form(batch))
