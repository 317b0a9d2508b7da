"""The dialect of the Messages API: its routes, and the forms of its answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, get_args

import msgspec
from aiohttp import web

from penstock.api.dialect import READ_REFUSALS, REFUSALS, Dialect, Edge, placing
from penstock.api.http.conventions import REQUEST_ID, Conventions
from penstock.api.http.errors import as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.request_body import receive
from penstock.api.http.wire import Reading, Wire
from penstock.extensions.dialects.messages.body import CountTokens, CreateMessage
from penstock.extensions.dialects.messages.errors import error, fault
from penstock.extensions.dialects.messages.events import PING, CreatedMessage, Event, MessageError, to_sse
from penstock.extensions.dialects.messages.threads import continued
from penstock.extensions.dialects.messages.writer import Display, MessageEvents, whole_message
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import ContextTooLong, InvalidRequest
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.validation import read_body
from penstock.services.engines.engine import Budgeted
from penstock.services.usage import Tally

Value = TypeVar("Value")


class TokenCount(msgspec.Struct, frozen=True):
    """The number of tokens of a prompt."""

    input_tokens: int


STAGE = "messages"
"""The name of the stage that writes the events."""


def form(events: MessageEvents) -> Wire:
    """Return the form of answers whose events a stage writes."""
    return _writing(events, Wire(to_sse, whole_message, Pipeline.start(STAGE, events), keep_alive=PING, fault=fault))


def _writing(events: MessageEvents, wire: Wire) -> Wire:
    """Return a form whose events another stage writes; what an operator put around that stage stays."""
    assert wire.outgoing is not None
    outgoing = wire.outgoing.replace(STAGE, events)

    def counting(tally: Tally) -> Pipeline[ResponseEvent, Event]:
        return outgoing.replace(STAGE, replace(events, so_far=tally.usage))

    return replace(wire, outgoing=outgoing, counting=counting)


FORMS: dict[Display, Wire] = {display: form(MessageEvents(display)) for display in get_args(Display)}


def read(body: bytes) -> Reading:
    """Read the body of a request for a message."""
    given = read_body(body, CreateMessage)
    return Reading(
        given.create_request,
        FORMS[given.display],
        bool(given.stream),
        place=given.place,
        generates=given.generates,
        forgives=True,
    )


def read_prompt(body: bytes) -> Reading:
    """Read the body of a request for the number of tokens of a prompt."""
    given = read_body(body, CountTokens)
    return Reading(given.create_request, FORMS["shown"], place=given.place, forgives=True)


@dataclass(frozen=True)
class Messages:
    """The Messages API over the edge of its dialect."""

    edge: Edge

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Return the routes under ``base``."""
        return (
            web.post(f"{base}/messages", self.create),
            web.post(f"{base}/messages/count_tokens", self.count_tokens),
        )

    @operation(Operation(CreatedMessage, body=CreateMessage, refusals=REFUSALS, streams=True))
    async def create(self, request: web.Request) -> web.StreamResponse:
        """Create a message, as a stream of events or as one object."""
        body = await receive(request)
        with self.edge.scheduler.in_flight, self._in_words_of_anthropic():
            reading = await self.edge.read(request, body)
            self.edge.await_events(request, reading)
            reading = reading.asking(await self._in_thread(await self._budgeted(reading.request), len(body)))
            del body  # free it, and then the reading: the answer may take long
            one = await self.edge.prepared(reading)
            del reading
            async with one as (prepared,):
                facts = prepared.resolved.facts
                most = facts.sampling.max_tokens if facts.purpose.generates else 0
                wire = _writing(replace(_events_of(prepared.wire), most=most), prepared.wire)
                named = replace(wire, encode=partial(_encoded, request[REQUEST_ID]))
                return await self.edge.answer(request, replace(prepared, wire=named))

    async def _in_thread(self, request: CreateResponse, size: int) -> CreateResponse:
        """Return a request with what its thread began with, if it is in one and the store has room for its body."""
        store = self.edge.scheduler.store
        if request.store is not False:
            await store.check_room(size)
        return await continued(request, store)

    async def _budgeted(self, request: CreateResponse) -> CreateResponse:
        """Return a request without its budget of thoughts if the engine cannot keep it: it is no hard limit."""
        if request.thinking_token_budget is None:
            return request
        engine = await self.edge.scheduler.loaded(request.envelope.owner, request.model)
        if isinstance(engine, Budgeted) and engine.bounds_thoughts:
            return request
        return request.model_copy(update={"thinking_token_budget": None})

    @operation(Operation(TokenCount, body=CountTokens, refusals=READ_REFUSALS))
    async def count_tokens(self, request: web.Request) -> web.Response:
        """Count the tokens of a prompt, which may be longer than the context."""
        body = await receive(request)
        with self.edge.scheduler.in_flight:
            reading = await self.edge.read(request, body, read_prompt)
            try:
                with placing(reading.place):
                    count = await self.edge.prompt_length(reading.request)
            except ContextTooLong as error:
                count = error.prompt_tokens
            return as_json(TokenCount(count))

    @contextmanager
    def _in_words_of_anthropic(self) -> Iterator[None]:
        """Write in Anthropic's words that a prompt is too long: clients that read them compact the conversation."""
        try:
            yield
        except ContextTooLong as error:
            tokens, most = error.prompt_tokens, error.limit
            message = f"prompt is too long: {tokens} tokens > {min(most, tokens - 1)} maximum"
            raise InvalidRequest(message, code=error.code) from error  # without a place, which is none of those words


def _encoded(request_id: str, event: Event) -> bytes:
    """Encode an event of a request, whose id errors have."""
    return to_sse(msgspec.structs.replace(event, request_id=request_id) if isinstance(event, MessageError) else event)


def _events_of(wire: Wire) -> MessageEvents:
    """Return the stage that writes the events of a form."""
    assert wire.outgoing is not None
    events: MessageEvents = wire.outgoing.stage(STAGE)
    return events


def _routes(edge: Edge) -> Sequence[web.RouteDef]:
    return Messages(edge).routes(edge.base)


MESSAGES = Dialect(
    "messages",
    base="/v1",
    read=read,
    wire=FORMS["shown"],
    routes=_routes,
    conventions=Conventions(
        ("x-api-key", "Authorization"),
        request_id_header="request-id",
        error=error,
        error_body=MessageError,
        mark="anthropic-version",
    ),
)
"""The dialect of the Messages API."""
