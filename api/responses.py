"""The routes of the Responses API, over one pipeline.

Streaming and not streaming are two consumers of the same events.  The first event is taken before any header goes out,
so that whatever refuses a request is still an HTTP status; behind it, failures are events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from api.admission import Admission
from api.answers import DeletedResponse, InputTokens, Items
from api.errors import as_json
from api.log import ANSWERED
from api.operation import Operation, operation
from api.pages import INCLUDE, PAGE, Wanted
from api.query import Flag, Number
from api.stream import obfuscated, send
from pipeline.core import Pipeline
from pipeline.errors import (
    BodyTooLarge,
    EngineDead,
    EngineOverloaded,
    InvalidRequest,
    ModelNotFound,
    ResponseNotFound,
    ServerStopping,
    StoreFailed,
)
from pipeline.frames import Prompt
from pipeline.logs import current_response
from pipeline.protocol.body import shortened
from pipeline.protocol.events import Event, ResponseEvent, TerminalEvent, to_sse
from pipeline.protocol.items import Item
from pipeline.protocol.reading import read_request
from pipeline.protocol.request import CreateResponse
from pipeline.protocol.response import Response
from pipeline.record import replay
from stages.persist.again import events_again
from stages.persist.store import ResponseStore, StoredResponse

STREAM = Flag("stream")
STARTING_AFTER = Number("starting_after", default=-1, least=0)
INCLUDE_OBFUSCATION = Flag("include_obfuscation")

_READING = (InvalidRequest, ModelNotFound, BodyTooLarge, StoreFailed, ServerStopping)
_CREATING = (*_READING, EngineOverloaded, EngineDead)


@dataclass
class Responses:
    """The Responses API under one base URL, whose dialect the last stages of ``outgoing`` speak."""

    pipeline: Pipeline[CreateResponse, ResponseEvent]
    outgoing: Pipeline[ResponseEvent, Any]
    store: ResponseStore
    admission: Admission
    keep_alive: float

    def __post_init__(self) -> None:
        self._answering: Pipeline[CreateResponse, Any] = Pipeline((*self.pipeline.steps, *self.outgoing.steps))
        self._rendering: Pipeline[CreateResponse, Prompt] = self.pipeline.upto("render")

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Its routes, each under ``base``."""
        one = f"{base}/responses/{{response_id}}"
        return (
            web.post(f"{base}/responses", self.create),
            web.post(f"{base}/responses/input_tokens", self.count_input_tokens),
            web.get(one, self.retrieve, allow_head=False),  # a HEAD would stream
            web.delete(one, self.delete),
            web.post(f"{one}/cancel", self.cancel),
            web.get(f"{one}/input_items", self.list_input_items),
        )

    @operation(Operation(Response, body=CreateResponse, refusals=_CREATING, streams=True))
    async def create(self, request: web.Request) -> web.StreamResponse:
        """Create a response, as a stream of events or as one object."""
        body = await request.read()
        with self.admission.one():
            wanted = (await read_request(body)).traced(request.headers)
            async with self._answering.open(replay([wanted])) as events:
                first = await anext(events)
                if not wanted.stream:
                    request[ANSWERED] = response = await _last_response(events)
                    return as_json(response)
                options = wanted.stream_options
                hides = options is not None and options.include_obfuscation is True
                return await self._send(request, [first], events, hides)

    @operation(Operation(InputTokens, body=CreateResponse, refusals=_READING))
    async def count_input_tokens(self, request: web.Request) -> web.Response:
        """Say how many tokens a request would be, by rendering it."""
        body = await request.read()
        with self.admission.one():
            wanted = await read_request(body)
            async with self._rendering.open(replay([wanted])) as prompts:
                prompt = await anext(prompts)
        return as_json(InputTokens(len(prompt.token_ids)))

    @operation(
        Operation(
            Response,
            query=(INCLUDE, STREAM, STARTING_AFTER, INCLUDE_OBFUSCATION),
            refusals=(InvalidRequest, ResponseNotFound),
            streams=True,
        )
    )
    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        """Look a stored response up, or stream it again."""
        INCLUDE.read(request)
        streams, hides, after = STREAM.read(request), INCLUDE_OBFUSCATION.read(request), STARTING_AFTER.read(request)
        response = (await self._stored(request)).response
        if not streams:
            return as_json(response)
        async with self.outgoing.open(replay(events_again(response))) as again:
            events = [event async for event in again if _is_due(event, after)]
        return await self._send(request, events, None, hides)

    @operation(Operation(DeletedResponse, refusals=(ResponseNotFound,)))
    async def delete(self, request: web.Request) -> web.Response:
        """Forget a stored response."""
        response_id = request.match_info["response_id"]
        if not await self.store.delete(response_id):
            raise ResponseNotFound(shortened(response_id))
        current_response.set(response_id)
        return as_json(DeletedResponse(response_id))

    @operation(Operation(None, refusals=(InvalidRequest, ResponseNotFound)))
    async def cancel(self, request: web.Request) -> web.Response:
        """Refuse: only what runs in the background can be cancelled, and whatever is stored has ended."""
        response = (await self._stored(request)).response
        raise InvalidRequest(f"The response {response.id} is not running in the background.", param="response_id")

    @operation(Operation(Items, query=PAGE, refusals=(InvalidRequest, ResponseNotFound)))
    async def list_input_items(self, request: web.Request) -> web.Response:
        """List what a stored response was given to read, page by page: the history that it continues included."""
        wanted = Wanted.read(request)
        response_id = request.match_info["response_id"]
        chain = await self.store.chain(response_id)
        if not chain:
            raise ResponseNotFound(shortened(response_id))
        current_response.set(response_id)
        return as_json(wanted.of(_input_items(chain)))

    async def _stored(self, request: web.Request) -> StoredResponse:
        response_id = request.match_info["response_id"]
        stored = await self.store.get(response_id)
        if stored is None:
            raise ResponseNotFound(shortened(response_id))
        current_response.set(response_id)
        return stored

    async def _send(
        self, request: web.Request, ready: Sequence[Event], rest: AsyncIterator[Event] | None, hides: bool
    ) -> web.StreamResponse:
        return await send(request, ready, rest, obfuscated if hides else to_sse, self.keep_alive)


async def _last_response(events: AsyncIterator[Any]) -> Response:
    async for event in events:
        if isinstance(event, TerminalEvent):
            return event.response
    raise RuntimeError("the stream ended without a terminal event")


def _is_due(event: Event, after: int) -> bool:
    """Whether a reader who has seen the event of number ``after`` still waits for this one.

    The end is always due: the number may be one of the first stream, which had more deltas and so higher numbers.
    """
    return event.sequence_number > after or isinstance(event, TerminalEvent)


def _input_items(chain: Sequence[StoredResponse]) -> tuple[Item, ...]:
    """The input of the last response of a chain, and all that came before it: once, also what it brings again."""
    *older, last = chain
    seen: dict[str, Item] = {}
    listed: list[Item] = []
    for item in (*(item for stored in older for item in stored.items), *last.input):
        if seen.get(item.id) != item:
            listed.append(item)
        seen[item.id] = item
    return tuple(listed)
