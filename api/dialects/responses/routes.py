"""The routes of the Responses API, over one pipeline.

Streaming and non-streaming requests consume the same events, whether the response runs in the request's own task, runs
elsewhere, or has long ended.  The first event is awaited before any header goes out, so that an error up to that point
is still an HTTP status, unless the client waited so long that it got a sign of life.  Later failures are events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from time import monotonic

from aiohttp import web

from penstock.api.dialect import READ_REFUSALS, REFUSALS, Edge
from penstock.api.dialects.responses.form import ResponseBody, last_response, read_compaction
from penstock.api.http.access_log import RESPONSE
from penstock.api.http.auth import OWNER
from penstock.api.http.bodies import CompactedResponse, DeletedResponse, InputTokens, Items
from penstock.api.http.errors import as_json, listed_as_json
from penstock.api.http.long_answers import events_in_pieces
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.pagination import INCLUDE, PAGE, PageRequest
from penstock.api.http.query import Flag, Number
from penstock.api.http.request_body import receive
from penstock.api.http.sse import send
from penstock.api.http.wire import Wire
from penstock.api.peers import FORWARDED, PeerLost, SseRelay
from penstock.api.runs.scheduler import Scheduler
from penstock.pipeline import errors, metrics
from penstock.pipeline.logs import current_response
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.request import CompactConversation
from penstock.pipeline.protocol.pieces import in_pieces, is_long
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.protocol.superseded import unsuperseded
from penstock.pipeline.tasks import MANY_VALUES, apart, in_thread
from penstock.pipeline.urls import shown_url
from penstock.services import tracing
from penstock.services.runs.run import Run, RunReleased, read_stored_log
from penstock.services.store.store import Server, Store, StoredResponse

logger = logging.getLogger(__name__)

RETRY = 0.5
"""Seconds between two attempts to reach another server."""

STREAM = Flag("stream", meaning="Return the events of the response, those to come too, in place of the response.")
STARTING_AFTER = Number(
    "starting_after", default=-1, least=0, meaning="Begin the stream after the event with this `sequence_number`."
)
INCLUDE_OBFUSCATION = Flag(
    "include_obfuscation", meaning="Add random characters to each delta, which hide its length in network packets."
)

_CREATE_REFUSALS = (*REFUSALS, errors.ConversationLocked, errors.StorageFull)
_COMPACT_REFUSALS = (*REFUSALS, errors.CompactionFailed)
_FIND_REFUSALS = (
    errors.InvalidRequest,
    errors.ResponseNotFound,
    errors.StoreFailed,
    errors.ServerUnreachable,
    errors.ModelAway,
)


@dataclass(frozen=True)
class Responses:
    """The Responses API over the edge of a dialect; ``hiding`` is the form of streams that obfuscate their deltas."""

    edge: Edge
    hiding: Wire

    @property
    def scheduler(self) -> Scheduler:
        """The runs of the server."""
        return self.edge.scheduler

    @property
    def store(self) -> Store:
        """The store of the responses."""
        return self.scheduler.store

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Return the routes under ``base``."""
        one = f"{base}/responses/{{response_id}}"
        return (
            web.post(f"{base}/responses", self.create),
            web.post(f"{base}/responses/input_tokens", self.count_input_tokens),
            web.post(f"{base}/responses/compact", self.compact),
            web.get(one, self.retrieve, allow_head=False),  # a HEAD would stream
            web.delete(one, self.delete),
            web.post(f"{one}/cancel", self.cancel),
            web.get(f"{one}/input_items", self.list_input_items),
        )

    @operation(Operation(Response, body=ResponseBody, refusals=_CREATE_REFUSALS, streams=True))
    async def create(self, request: web.Request) -> web.StreamResponse:
        """Create a response, as a stream of events or as one object."""
        body = await receive(request)
        with self.scheduler.in_flight:
            one = await self.edge.prepared_from(request, body)
            del body  # free it: the response may take long
            async with one as (prepared,):
                if prepared.resolved.facts.response.background and not prepared.streams:
                    request[RESPONSE] = queued = (await self.scheduler.queue(prepared.opened)).response
                    return as_json(queued)
                return await self.edge.answer(request, prepared)

    @operation(Operation(CompactedResponse, body=CompactConversation, refusals=_COMPACT_REFUSALS))
    async def compact(self, request: web.Request) -> web.Response:
        """Compact a conversation: return the items that stand for it from now on."""
        body = await receive(request)
        with self.scheduler.in_flight:
            one = await self.edge.prepared_from(request, body, read_compaction)
            del body
            async with one as (prepared,), aclosing(self.scheduler.run(prepared.opened, "sync")) as events:
                request[RESPONSE] = response = await last_response(events)
            resolved = prepared.resolved
        if response.status != "completed" or response.usage is None:
            raise errors.CompactionFailed(response.error.message if response.error else "The compaction was cancelled.")
        items = (*resolved.facts.input, *response.output)
        window = await apart(len(resolved.history) + len(items) > MANY_VALUES, unsuperseded, resolved.history, items)
        compacted = CompactedResponse(response.id, response.created_at, window, response.usage)
        del window, items  # so that `listed_as_json` lets go of them in a thread
        return await listed_as_json(compacted, "output")

    @operation(Operation(InputTokens, body=ResponseBody, refusals=READ_REFUSALS))
    async def count_input_tokens(self, request: web.Request) -> web.Response:
        """Count the input tokens of a request, by rendering it."""
        return as_json(InputTokens(await self.edge.count_tokens(request)))

    @operation(
        Operation(
            Response,
            query=(INCLUDE, STREAM, STARTING_AFTER, INCLUDE_OBFUSCATION),
            refusals=(*_FIND_REFUSALS, errors.StreamExpired),
            streams=True,
        )
    )
    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        """Retrieve a response as it stands, or stream its events: past ones first, then live ones while it runs."""
        INCLUDE.read(request)
        streams, after = STREAM.read(request), STARTING_AFTER.read(request)
        wire = self.hiding if INCLUDE_OBFUSCATION.read(request) else self.edge.dialect.wire
        if not streams:
            try:
                response = await self._response(request)
                return as_json(await in_thread(in_pieces, response) if is_long(response) else response)
            except errors.ResponseNotFound:
                if sibling := await self._sibling(request):
                    return await self.edge.peers.forward(request, sibling)
                raise
        metrics.RESUMES.inc()
        found = await self._find(request)
        if isinstance(found, Server):
            async with aclosing(self._relayed(request, found, after, wire)) as frames:
                return await send(request, frames, replace(wire, encode=bytes, fault=None), self.edge.keep_alive)
        async with wire.translated(await self._events_after(found, after)) as events:
            if wire.outgoing is None and (found.response.top_logprobs or is_long(found.response)):
                async with aclosing(events_in_pieces(events)) as written:
                    return await send(request, written, wire, self.edge.keep_alive)
            return await send(request, events, wire, self.edge.keep_alive)

    @operation(Operation(DeletedResponse, refusals=_FIND_REFUSALS))
    async def delete(self, request: web.Request) -> web.StreamResponse:
        """Delete a response; if it is still queued or running, it is cancelled first."""
        found = await self._find_or_forward(request)
        if isinstance(found, web.Response):
            return found
        if isinstance(found, Run):
            await self.scheduler.cancel(found)
        response_id = found.response.id
        if not await self.store.delete(response_id, request[OWNER]) and found.response.store:
            raise errors.ResponseNotFound(shortened(response_id), keeps=self.store.keeps)
        return as_json(DeletedResponse(response_id))

    @operation(Operation(Response, refusals=_FIND_REFUSALS))
    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """Cancel a queued or running response, and return it with the output that it has so far.

        A response that has ended stays as it is.  If it was not a background response and was not cancelled either,
        the answer is status 400.
        """
        found = await self._find_or_forward(request)
        if isinstance(found, web.Response):
            return found
        if isinstance(found, Run) and not found.ended:
            return as_json(await self.scheduler.cancel(found))
        response = found.response
        if not response.background and response.status != "cancelled":
            raise errors.InvalidRequest(
                f"The response {response.id} has ended, and it did not run in the background.", param="response_id"
            )
        return as_json(response)

    @operation(Operation(Items, query=PAGE, refusals=_FIND_REFUSALS))
    async def list_input_items(self, request: web.Request) -> web.Response:
        """List the input items of a stored response page by page, including the history that it continues."""
        page = PageRequest.read(request)
        response_id, owner = request.match_info["response_id"], request[OWNER]
        input_items = await self.store.input_items(response_id, owner)
        if input_items is None:
            raise errors.ResponseNotFound(shortened(response_id), keeps=self.store.keeps)
        current_response.set(response_id)
        return as_json(page.of(await apart(len(input_items) > MANY_VALUES, _once, input_items)))

    async def _response(self, request: web.Request) -> Response:
        """Return the response named in the path, as it stands; raise `ResponseNotFound` if there is none."""
        response_id, owner = request.match_info["response_id"], request[OWNER]
        known = self.scheduler.runs.get(response_id, owner) or await self.store.get(response_id, owner)
        if known is None:
            raise errors.ResponseNotFound(shortened(response_id), keeps=self.store.keeps)
        if isinstance(known, Run) and known.ended:
            await known.committed()  # so that the client can continue it at any server
        current_response.set(response_id)
        return known.response

    async def _find(self, request: web.Request, *, ends: bool = False) -> Run | StoredResponse | Server:
        """Find the response named in the path, perhaps to end it: live here, stored, or on another server."""
        response_id = request.match_info["response_id"]
        try:
            found = await self.scheduler.find(response_id, request[OWNER], ends=ends)
        except errors.ResponseNotFound:
            if sibling := await self._sibling(request):
                return sibling
            raise
        if isinstance(found, Server) and FORWARDED in request.headers:
            raise errors.ServerUnreachable  # it has moved on; the forwarding server looks it up again
        current_response.set(response_id)
        return found

    async def _sibling(self, request: web.Request) -> Server | None:
        """Return the frontend of this server that runs the response named in the path, if it is not stored."""
        if FORWARDED in request.headers:
            return None
        return await self.edge.peers.search(request, request.match_info["response_id"])

    async def _find_or_forward(self, request: web.Request) -> Run | StoredResponse | web.Response:
        """Return the response to end if this server has it, or else the answer of the server that runs it.

        Raises `ServerUnreachable` if that server does not answer within ``peers.patience`` seconds.
        """
        deadline = monotonic() + self.edge.peers.patience
        while isinstance(found := await self._find(request, ends=True), Server):
            try:
                return await self.edge.peers.forward(request, found)
            except PeerLost as error:
                if monotonic() > deadline:
                    raise errors.ServerUnreachable from error
            await asyncio.sleep(RETRY)
        return found

    async def _events_after(self, found: Run | StoredResponse, after: int) -> AsyncGenerator[ResponseEvent, None]:
        """Return the events after the sequence number ``after``.

        Raises `StreamExpired` if they are no longer kept, and `ResponseNotFound` if the response was just deleted.
        """
        if isinstance(found, Run):
            tracing.link_current(found.trace_headers)
            return found.follow(after)
        response_id = found.response.id
        if not (blocks := await self.store.blocks(response_id)):
            raise errors.ResponseNotFound(shortened(response_id), keeps=self.store.keeps)
        return read_stored_log(found.response, blocks, after)

    async def _relayed(
        self, request: web.Request, found: Run | StoredResponse | Server, after: int, wire: Wire
    ) -> AsyncGenerator[bytes, None]:
        """Relay the frames of a response that another server runs.

        If that server is lost, the stream continues from the server that takes over, or from the store.  Raises
        `RunReleased` if the response may have run again since, with other events.
        """
        relayed, missed = SseRelay(after), ""
        while isinstance(found, Server):
            try:
                async with aclosing(self.edge.peers.frames(request, found, relayed)) as frames:
                    async for frame in frames:
                        yield frame
            except PeerLost as error:
                # Log the loss of a server once; further attempts to reach it are only of interest for debugging.
                level = logging.DEBUG if found.id == missed else logging.INFO
                logger.log(level, "A stream continues without %s: %s", shown_url(found.url), error)
                missed = found.id
            else:
                return
            await asyncio.sleep(RETRY)
            lost, found = found, await self._find(request)
            if found != lost and await self._may_have_run_again(request):
                raise RunReleased
        async with wire.translated(await self._events_after(found, relayed.last)) as events:
            async for event in events:
                yield wire.encode(event)

    async def _may_have_run_again(self, request: web.Request) -> bool:
        """Return True if a response whose server was lost is one that starts over then."""
        return self.scheduler.restarts and (await self._response(request)).background


def _once(items: Sequence[Item]) -> list[Item]:
    """Leave out items that are equal to the previous item with the same id."""
    seen: dict[str, Item] = {}
    listed: list[Item] = []
    for item in items:
        if seen.get(item.id) != item:
            listed.append(item)
        seen[item.id] = item
    return listed
