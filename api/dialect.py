"""Dialects: the ways in which clients speak to one pipeline, each a value.

A dialect reads bodies into requests of the pipeline, and rewrites the events of responses.  All else is the same for
each: keys, limits, the access log, metrics, traces, recordings and the stages of the operator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self, TypeAlias
from urllib.parse import unquote

from aiohttp import web

from penstock.api.http.access_log import MODEL, RESPONSE, STARTED, client_request_id, name_model
from penstock.api.http.agent_sessions import session_of_agent
from penstock.api.http.auth import OWNER, team_of, title_of
from penstock.api.http.beginning import Beginning, Delivery
from penstock.api.http.conventions import OPENAI, REQUEST_ID, Conventions, Spoken
from penstock.api.http.errors import PROBLEM, as_json
from penstock.api.http.long_answers import events_in_pieces, may_be_long
from penstock.api.http.request_body import off_loop, receive, release
from penstock.api.http.sse import await_events, send
from penstock.api.http.wire import Reading, Wire
from penstock.api.http.woven import Strand, woven
from penstock.api.open_sockets import OpenSockets
from penstock.api.peers import FORWARDED, MODEL_HEADER, Peers
from penstock.api.runs.opened import Opened
from penstock.api.runs.scheduler import Scheduler, let_go_of
from penstock.pipeline import errors
from penstock.pipeline.core import Pipeline
from penstock.pipeline.faults import first
from penstock.pipeline.frames import Prompt, ResolvedRequest, TokenIds
from penstock.pipeline.halfway import handed_over
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse, Envelope, trace_headers
from penstock.pipeline.protocol.pieces import in_pieces
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.sampling import ALWAYS, Condition
from penstock.pipeline.tasks import in_thread, let_go
from penstock.services import tracing
from penstock.services.engines.affinity import SESSION_HEADER
from penstock.services.runs.run import Mode, Run, RunRegistry
from penstock.services.usage import Tally

Read: TypeAlias = Callable[[bytes], Reading]
"""A function that reads a body; it raises `InvalidRequest` for a wrong one."""

READ_REFUSALS = (
    errors.InvalidRequest,
    errors.ModelNotFound,
    errors.ConversationNotFound,
    errors.StoreFailed,
    errors.ServerStopping,
)
"""The errors that reading a request may raise."""

REFUSALS = (*READ_REFUSALS, errors.EngineOverloaded, errors.EngineDead, errors.DiskFull)
"""The errors that keep a response from beginning."""


_FAILURES: Mapping[str | None, type[errors.StageError]] = {
    "rate_limit_exceeded": errors.EngineOverloaded,
    "invalid_prompt": errors.InvalidPrompt,
    "context_length_exceeded": errors.InvalidPrompt,
}
"""The errors of failed responses by their code; all others are `EngineFailed`."""


def failed(code: str | None, message: str) -> errors.StageError:
    """Return the error of a response that failed with a code and a message."""
    error = _FAILURES.get(code, errors.EngineFailed)(message)
    error.code = code or error.code
    return error


def failure(response: Response) -> errors.StageError:
    """Return the error that a response failed with, for dialects whose answers cannot have failed."""
    if response.error is None:
        return errors.EngineFailed("The response was cancelled.")
    return failed(response.error.code, response.error.message)


@dataclass(frozen=True, eq=False)  # hashed by identity
class Dialect:
    """A way to speak to the server, under the URL ``base``.

    ``read`` takes the body of a request, and raises `InvalidRequest` for a wrong one.  ``wire`` is the form of an
    answer that the body does not change.  ``routes`` returns the routes; each that takes a body is an `operation`.
    """

    name: str
    base: str
    read: Read
    wire: Wire
    routes: Callable[[Edge], Sequence[web.RouteDef]]
    conventions: Conventions = OPENAI

    def spoken_on(self, routes: Sequence[web.RouteDef]) -> Spoken:
        """Return the dialect as its clients see it, on its routes."""
        return Spoken(self.name, self.base, self.conventions, tuple(f"{route.method} {route.path}" for route in routes))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that the pipeline has read and can run, and the form of its answer."""

    opened: Opened
    wire: Wire
    streams: bool
    place: Callable[[str], str] = str
    """Return the place in the body of a parameter of the request."""

    @property
    def resolved(self) -> ResolvedRequest:
        """The request, as `normalize` has given it."""
        return self.opened.request


class AllPrepared(list[Prepared]):
    """The requests of an answer, for the length of a block; most have one response, and thus one request."""

    __slots__ = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        async with AsyncExitStack() as closing:
            for prepared in self:
                closing.push_async_callback(prepared.opened.aclose)


class _Begun:
    """The run of a request, for the length of a block that begins with its first event; an error before is raised.

    A class, as the frame of a generator would take more memory.
    """

    __slots__ = ("_delivery", "_events", "_prepared", "_request", "_run", "_runs")

    def __init__(
        self,
        request: web.Request,
        prepared: Prepared,
        events: AsyncGenerator[ResponseEvent, None],
        beginning: Beginning | None,
        runs: RunRegistry,
    ) -> None:
        self._request = request
        self._prepared = prepared
        self._events = events
        self._delivery = Delivery(events, beginning)
        self._runs = runs
        self._run: Run | None = None

    async def __aenter__(self) -> Delivery:
        try:
            with placing(self._prepared.place):
                await self._delivery.begin()
        except BaseException:
            await self._events.aclose()
            raise
        self._run = self._runs.get(self._prepared.resolved.facts.response_id, self._request[OWNER])
        return self._delivery

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._prepared.opened.note(error)
        if self._delivery.has_ended:
            self._request[RESPONSE] = self._delivery.response
        has_left = isinstance(error, _LEFT)
        try:
            await self._events.aclose()
        except _LEFT:
            has_left = True
            raise
        finally:
            if has_left and self._run and self._run.ended:  # with its client, so that its end was not sent
                self._request[RESPONSE] = self._run.response


_LEFT = (asyncio.CancelledError, ConnectionResetError)
"""The errors of an answer whose client has left."""


@dataclass(frozen=True)
class Edge:
    """The runs of the server for the routes of one dialect, and the handlers that all dialects share."""

    dialect: Dialect
    scheduler: Scheduler
    peers: Peers
    sockets: OpenSockets
    keep_alive: float
    """Seconds of silence on a stream before its client gets a sign of life."""
    recorded_if: Condition = ALWAYS

    @property
    def base(self) -> str:
        """The base URL of the dialect."""
        return self.dialect.base

    async def create(
        self, request: web.Request, about_to_run: Callable[[Prepared], object] = lambda _: None
    ) -> web.StreamResponse:
        """Create a response, as a stream of events or as one body.

        ``about_to_run`` gets a request that runs alone, before it does.
        """
        body = await receive(request)
        with self.scheduler.in_flight:
            prepared = await self.prepared_from(request, body)
            del body  # free it: the response may take long
            async with prepared:
                if len(prepared) > 1:
                    return await self.answer_woven(request, prepared)
                about_to_run(prepared[0])
                return await self.answer(request, prepared[0])

    async def count_tokens(self, request: web.Request, read: Read | None = None) -> int:
        """Return the number of tokens of the prompt that a body asks for, by rendering it."""
        body = await receive(request)
        with self.scheduler.in_flight:
            reading = await self.read(request, body, read)
            with placing(reading.place):
                return await self.prompt_length(reading.request)

    async def prompt_length(self, create_request: CreateResponse) -> int:
        """Return the number of tokens of the prompt of a request, by rendering it."""
        tokens = await self._rendered(create_request)
        let_go(tokens)
        return len(tokens)

    async def prompt_tokens(self, reading: Reading) -> TokenIds:
        """Return the tokens of the prompt of a reading, by rendering it."""
        with placing(reading.place):
            return await self._rendered(reading.request)

    async def _rendered(self, create_request: CreateResponse) -> TokenIds:
        if self._rendering is None:
            raise errors.InvalidRequest(
                "This server cannot count tokens: the prompt is made elsewhere.", code="unsupported_operation"
            )
        try:
            async with self._rendering.open(handed_over([create_request])) as prompts:
                tokens = (await first(prompts)).token_ids
                async for _ in prompts:  # so that the code after the loops of the stages runs, too
                    pass
            return tokens
        finally:
            let_go_of(create_request)

    async def prepared_from(self, request: web.Request, body: bytes, read: Read | None = None) -> AllPrepared:
        """Read a body as `read` does, and prepare its requests as `prepared` does."""
        reading = await self.read(request, body, read)
        self.await_events(request, reading)
        if reading.request.store is not False:
            await self.scheduler.store.check_room(len(body))
        try:
            return await self.prepared(reading)
        except errors.ContainerElsewhere as error:
            error.body = body
            error.stays = not await self.peers.serves(request, error.url, request[MODEL])
            if not error.stays:
                raise
        try:
            return await self.prepared(self.enveloped(request, reading, stays=True))
        except errors.ContainerElsewhere as error:  # the request names it
            error.stays = True
            raise

    def await_events(self, request: web.Request, reading: Reading) -> None:
        """Give the client of a request signs of life from now on, until its answer, if that is a stream."""
        if reading.streams:
            await_events(request, reading.wire, self.keep_alive)

    async def prepared(self, reading: Reading) -> AllPrepared:
        """Open the pipeline for each request of a reading; the caller closes them, by a block."""
        async with AsyncExitStack() as closing:
            prepared = await closing.enter_async_context(AllPrepared())
            with placing(reading.place):
                for request in (reading.request, *reading.others):
                    opened = await self.scheduler.prepare(request)
                    prepared.append(Prepared(opened, reading.wire, reading.streams, reading.place))
            closing.pop_all()
        return prepared

    async def read(self, request: web.Request, body: bytes, read: Read | None = None) -> Reading:
        """Read a body as the dialect does, or with another function, and put its request into an envelope."""
        try:
            reading = await off_loop(read or self.dialect.read, body)
        except errors.InvalidRequest:
            name_model(request, body)
            raise
        if reading.request.model is None and FORWARDED in request.headers and MODEL_HEADER in request.headers:
            model = {"model": unquote(request.headers[MODEL_HEADER])}
            reading = reading.asking(*(each.model_copy(update=model) for each in (reading.request, *reading.others)))
        request[MODEL] = reading.request.model or self.scheduler.resolved(request[OWNER], None)
        reading = self.enveloped(request, reading)
        request[REQUEST_ID] = reading.request.envelope.request_id or request[REQUEST_ID]
        return reading

    def enveloped(self, request: web.Request, reading: Reading, *, stays: bool = False) -> Reading:
        """Put the request of a reading into an envelope: what the HTTP request says besides the body.

        If it ``stays``, it is not passed on to another server.
        """
        headers = request.headers
        envelope = Envelope(
            request[OWNER],
            trace_headers=tracing.current_headers(trace_headers(headers)),
            body=reading.as_sent,
            is_recorded=self.recorded_if.is_met_by(headers),
            request_id=client_request_id(request, reading.request.request_id),
            session=headers.get(SESSION_HEADER, ""),
            agent_session=session_of_agent(headers),
            key_name=title_of(request),
            team=team_of(request),
            api=self.dialect.name,
            generates=reading.generates,
            moves=request.method == "POST" and FORWARDED not in headers and not stays,
            forgives=reading.forgives,
        )
        return reading.asking(*(each.inside(envelope) for each in (reading.request, *reading.others)))

    async def answer(self, request: web.Request, prepared: Prepared) -> web.StreamResponse:
        """Run a request, and answer in its form; an error before the first event is raised."""
        wire = prepared.wire
        async with self._begun(request, prepared) as delivery:
            release(request)
            is_long = may_be_long(prepared.resolved, request.content_length or 0)
            async with wire.translated(delivery.events(), self._tally(prepared)) as events:
                answer = await self._written(request, events, wire, streams=prepared.streams, is_long=is_long)
                prepared.opened.is_unsent = PROBLEM in answer
                return answer

    def _written(
        self, request: web.Request, events: AsyncIterator[Any], wire: Wire, *, streams: bool, is_long: bool
    ) -> Awaitable[web.StreamResponse]:
        """Send rewritten events, or one body."""
        if not streams:
            return self._folded(events, wire, is_long=is_long)
        if is_long and wire.outgoing is None:
            return self._sent_in_pieces(request, events, wire)
        return send(request, events, wire, self.keep_alive)

    async def _sent_in_pieces(self, request: web.Request, events: AsyncIterator[Any], wire: Wire) -> web.StreamResponse:
        async with aclosing(events_in_pieces(events)) as written:
            return await send(request, written, wire, self.keep_alive)

    async def _folded(self, events: AsyncIterator[Any], wire: Wire, *, is_long: bool) -> web.StreamResponse:
        with self._cut_off():
            body = await wire.fold(events)
            async for _ in events:  # a fold may stop at the last event, after which stages have code to run
                pass
            return as_json(await in_thread(in_pieces, body) if is_long else body)

    @contextmanager
    def _cut_off(self) -> Iterator[None]:
        """Raise `ServerStopping` for a body that a stopping server has cut off."""
        try:
            yield
        except errors.EngineFailed:
            if self.scheduler.in_flight.stopping:
                raise errors.ServerStopping from None
            raise

    async def answer_woven(self, request: web.Request, prepared: Sequence[Prepared]) -> web.StreamResponse:
        """Run several requests at once, and answer in one form; an error before all have begun is raised."""
        wire, streams = prepared[0].wire, prepared[0].streams
        is_long = may_be_long(prepared[0].resolved, request.content_length or 0)
        strands = [partial(self._strand, request, each) for each in prepared]
        return await self._answer_strands(request, strands, wire, streams=streams, is_long=is_long)

    async def answer_each(
        self, request: web.Request, wire: Wire, parts: Sequence[Callable[[], Reading]], at_once: int
    ) -> web.StreamResponse:
        """Read, prepare and run each part of an answer when its turn comes; the answer is no stream.

        Fewer than ``at_once`` run if their client may have fewer responses.  The first one runs alone: the others find
        in the caches of the engine what their prompts share.
        """
        most = self.scheduler.admission.most_responses(request[OWNER])
        begun, places = asyncio.Event(), asyncio.Semaphore(int(min(at_once, most)))

        async def strand(position: int, part: Callable[[], Reading]) -> AsyncGenerator[Any, None]:
            if position:
                await begun.wait()
            async with (
                places,
                await self.prepared(part()) as (prepared,),
                aclosing(self._strand(request, prepared)) as events,
            ):
                async for event in events:
                    begun.set()
                    yield event

        strands = [partial(strand, position, part) for position, part in enumerate(parts)]
        return await self._answer_strands(request, strands, wire)

    async def _answer_strands(
        self,
        request: web.Request,
        strands: Sequence[Strand],
        wire: Wire,
        *,
        streams: bool = False,
        is_long: bool = True,
    ) -> web.StreamResponse:
        if wire.weave is None:
            raise TypeError("a Wire for several responses needs a weave")
        with self._cut_off():
            async with woven(strands) as values:
                release(request)
                async with aclosing(wire.weave(values)) as events:
                    return await self._written(request, events, wire, streams=streams, is_long=is_long)

    async def _strand(self, request: web.Request, prepared: Prepared) -> AsyncGenerator[Any, None]:
        """Run one request, and yield its rewritten events."""
        async with (
            self._begun(request, prepared) as delivery,
            prepared.wire.translated(delivery.events(), self._tally(prepared)) as events,
        ):
            async for event in events:
                yield event

    def _tally(self, prepared: Prepared) -> Tally:
        return self.scheduler.runs.tallies.of(prepared.resolved.facts.response_id)

    def _begun(self, request: web.Request, prepared: Prepared) -> _Begun:
        """Run a request for the length of a block."""
        mode: Mode = "stream" if prepared.streams else "sync"
        model = prepared.resolved.facts.model
        beginning = Beginning(self.dialect.name, model, request[STARTED]) if prepared.streams else None
        return _Begun(
            request=request,
            prepared=prepared,
            events=self.running(request, prepared, mode),
            beginning=beginning,
            runs=self.scheduler.runs,
        )

    def running(self, request: web.Request, prepared: Prepared, mode: Mode) -> AsyncGenerator[ResponseEvent, None]:
        """Return the events of a request that runs."""
        return self.scheduler.run(prepared.opened, mode)

    @cached_property
    def _rendering(self) -> Pipeline[CreateResponse, Prompt] | None:
        pipeline = self.scheduler.pipeline
        return pipeline.through("render") if "render" in pipeline.names() else None


@contextmanager
def placing(place: Callable[[str], str]) -> Iterator[None]:
    """Have errors name the place in the body of the parameter that is wrong."""
    try:
        yield
    except errors.StageError as error:
        if error.param is not None:
            error.param = place(error.param)
        raise
