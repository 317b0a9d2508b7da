"""One connection: it reads the events of its client, runs their responses, and sends the events of these.

Each response runs in a task of its own, so that lanes do not wait for each other.  A client that leaves cancels all of
them.  The connection remembers the latest response of each lane, also one that is not stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web
from msgspec import UNSET

from penstock.api.dialect import Edge
from penstock.api.http.access_log import log_exchange
from penstock.api.http.auth import OWNER, check_key
from penstock.api.http.beginning import Beginning, Delivery
from penstock.api.http.errors import PROBLEM, answer_to
from penstock.api.http.held_bytes import HeldBody
from penstock.api.http.long_answers import events_in_pieces, may_be_long
from penstock.api.http.request_body import off_loop
from penstock.api.http.sse import LONG_FRAME
from penstock.api.http.trace import trace_exchange
from penstock.api.http.wire import Reading, Wire
from penstock.api.open_sockets import Latest
from penstock.api.runs.opened import Opened
from penstock.api.runs.scheduler import Scheduler
from penstock.api.socket.events import PROCESSED, STEER, ClientEvent, ErrorEvent, frame_of, read_event, with_lane
from penstock.api.socket.incoming import Incoming
from penstock.api.socket.lanes import Lanes, TooManyStreamIds
from penstock.api.socket.memory import LaneMemory, latest_of
from penstock.api.socket.steers import (
    Steer,
    SteerAccepted,
    SteerEvent,
    SteerFailed,
    Steers,
    read_input,
    successor,
    with_input,
)
from penstock.pipeline import metrics
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.hot_path import join
from penstock.pipeline.protocol.history import History
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.tasks import until_it_waits
from penstock.services.runs.run import Run, RunReleased
from penstock.stages.normalize.recall import CONTINUABLE

logger = logging.getLogger(__name__)

LIFETIME = 3600.0
"""Seconds after which a connection takes no new requests, and is closed once its responses have ended."""

MOST_WAITING = 64
"""Requests that wait before no further ones are read from the connection."""

CLOSE_WAIT = 2.0
"""Seconds that a client has to close its end of a connection."""

PING = b"\x89\x00"
UNANSWERED = b"\x88\x1e" + WSCloseCode.POLICY_VIOLATION.to_bytes(2, "big") + b"Two pings were not answered."
"""The frames of a ping, and of the close that follows two of them."""

MOST_UNANSWERED = 2
"""Pings without an answer after which a connection is closed."""


class ConnectionExpired(InvalidRequest):
    """The connection is too old for new requests."""

    code = "websocket_connection_limit_reached"

    def __init__(self) -> None:
        super().__init__(
            "Responses websocket connection limit reached (60 minutes). Create a new websocket connection to continue."
        )


@dataclass(eq=False)  # hashed by identity: two requests may be alike
class _Create:
    """A request for a response, as it was read from a frame, which is dropped once its parameters are read."""

    event: ClientEvent
    frame: bytes
    size: int


@dataclass(eq=False)  # hashed by identity
class Connection:
    """The connection of ``request``, with its open ``socket``, over the ``edge`` of a dialect."""

    socket: web.WebSocketResponse
    request: web.Request
    edge: Edge
    memory: LaneMemory
    incoming: Incoming
    _steers: Steers = field(init=False)
    _lanes: Lanes[_Create] = field(default_factory=Lanes[_Create])
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _has_room: asyncio.Event = field(default_factory=asyncio.Event)
    _unread: dict[object, HeldBody] = field(default_factory=dict)
    """The bytes that are held for requests that have not been read yet, and for accepted input, by its id."""
    _is_expired: bool = False
    _sent_at: float = 0.0

    def __post_init__(self) -> None:
        self._steers = Steers(self.request.client_max_size)

    @property
    def scheduler(self) -> Scheduler:
        """The runs of the server."""
        return self.edge.scheduler

    async def run(self) -> None:
        """Serve the client until it leaves, or until the connection is closed."""
        loop = asyncio.get_running_loop()
        self._sent_at = monotonic()
        expiry = loop.call_later(LIFETIME, self._expire)
        pinging = asyncio.create_task(self._keep_alive())
        try:
            async for message in self.socket:
                if message.type is WSMsgType.ERROR:
                    if isinstance(message.data, WebSocketError):
                        logger.info("A connection is closed, as its frames cannot be taken: %s", str(message.data))
                    break
                await self._take(message.type, message.data)
                del message  # it may be large, and the next one far off
                await self._wait_for_room()
        finally:
            self.incoming.end()
            expiry.cancel()
            pinging.cancel()
            await self._leave()

    async def close(self) -> None:
        """Close the connection because the server stops."""
        await self._close(WSCloseCode.GOING_AWAY, b"The server is stopping.")

    # Reading

    async def _take(self, kind: WSMsgType, data: Any) -> None:
        """Take a message of the client; answer a wrong one with an error."""
        event, lane, held = ClientEvent(), None, self.incoming.pass_on()
        with ExitStack() as releasing:
            releasing.callback(held.release)
            try:
                try:
                    event = await off_loop(read_event, data if kind is WSMsgType.TEXT else b"")
                    lane = self._lanes.enter(event.stream_id) if event.type != STEER else None
                finally:  # a wrong event counts as a request, too, and a confirmation is none
                    if event.type != PROCESSED:
                        await self.scheduler.admission.admit(self.request[OWNER])
                if event.type == STEER:
                    self._check_admission()
                    lane, answer = self._steers.take(
                        await off_loop(read_input, data, event.previous_response_id, event.input)
                    )
                    if isinstance(answer, SteerAccepted):
                        self._unread[answer.steer.id] = held
                        releasing.pop_all()
                    await self._tell(lane, [answer])
                    return
                if event.type == PROCESSED:
                    return
                self._check_admission()
            except Exception as error:  # noqa: BLE001 - the client gets it
                await self._refuse_create(event, error.name if isinstance(error, TooManyStreamIds) else lane, error)
                return
            releasing.pop_all()
        create = _Create(event, data, len(data))
        self._unread[create] = held
        for job in self._lanes.add(lane, create):
            self._start(*job)

    def _check_admission(self) -> None:
        """Raise `ConnectionExpired` or `Unauthorized` if the connection takes no new requests."""
        if self._is_expired:
            raise ConnectionExpired
        check_key(self.request)

    async def _wait_for_room(self) -> None:
        """Wait until fewer requests wait: more are not read, so that the client waits, too."""
        while self._lanes.waiting >= MOST_WAITING:
            self._has_room.clear()
            await self._has_room.wait()

    # Running

    def _start(self, lane: str | None, create: _Create) -> None:
        task = asyncio.create_task(self._respond(lane, create))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._release(create))  # it may be cancelled before its first step

    def _release(self, held: object) -> None:
        """Stop holding the bytes of a request, or of input, if they are held."""
        if body := self._unread.pop(held, None):
            body.release()

    async def _respond(self, lane: str | None, create: _Create) -> None:
        """Run one response, and start those that waited for its end."""
        try:
            await self._answer(lane, create)
        except ConnectionResetError:
            logger.debug("A client left in the middle of its response")
        finally:
            for job in self._lanes.end(lane):
                self._start(*job)
            self._has_room.set()
            if self._is_expired and self._lanes.is_idle:
                self._expire()

    async def _answer(self, lane: str | None, create: _Create) -> None:
        """Answer a request, and go on with the input that steers its response, and the next."""
        started = monotonic()
        try:
            with self.scheduler.in_flight:
                reading = await self._read(create)
                create.frame = b""
            steers, events = self._steers.continue_(lane, reading.request.previous_response_id)
            await self._tell(lane, events)
        except Exception as error:  # noqa: BLE001 - the client gets it
            self._release(create)
            await self._refuse_create(create.event, lane, error, started)
            return
        first = reading.asking(with_input(reading.request, steers))
        exchange = self._exchange(self._respond_to(lane, first, started, steers, create))
        reading = reading.asking(successor(reading.request))
        del first  # keep no input while the response runs
        while run := await exchange:
            steers, events = self._steers.end(run)
            await self._tell(lane, events)
            if not steers:
                return
            going_on = reading.request.model_copy(update={"previous_response_id": run.response.id})
            following = reading.asking(with_input(going_on, steers))
            exchange = self._exchange(self._respond_to(lane, following, monotonic(), steers))
            del going_on, following

    async def _exchange(self, responding: Coroutine[Any, Any, Run | None]) -> Run | None:
        """Await `_respond_to` in a trace of its own."""
        with trace_exchange(self.socket):
            return await responding

    async def _respond_to(
        self,
        lane: str | None,
        reading: Reading,
        started: float,
        steers: Sequence[Steer],
        create: _Create | None = None,
    ) -> Run | None:
        """Send the events of one response, and return its run, or send the error that keeps it from beginning.

        ``create`` is the client's request.  If the request is the server's own, only its ``steers`` are refused.
        """
        request, wire = reading.request, reading.wire
        model, previous = request.model or self.scheduler.engine.models[0], request.previous_response_id
        sent = (create.size if create else 0) + sum(steer.input.size for steer in steers)
        parent: Latest | None = None
        try:
            with self.scheduler.in_flight:
                try:
                    parent = self.memory.find(previous)
                    opened = await self.scheduler.prepare(_continuing(request, parent.history if parent else None))
                finally:
                    for held in (create, *(steer.id for steer in steers)):
                        self._release(held)
                del request, reading
                async with opened:
                    run = await self._stream(lane, wire, opened, started, sent)
        except ConnectionResetError:
            raise
        except RunReleased:  # the response goes on at another server
            await self.close()
        except Exception as error:  # noqa: BLE001 - the client gets it
            self.memory.forget(lane, previous)
            answer = answer_to(self.request, error)
            lost = [*steers, *self._steers.lose(lane)]
            await self._tell(lane, self._steers.fail(lost, answer[PROBLEM].message))
            if create:
                await self._refuse(answer, lane, started, model)
        else:
            if run.response.status in CONTINUABLE:
                self.memory.remember(lane, await latest_of(opened.request, run, parent, sent))
            log_exchange(self.request, run.response, started)
            return run
        return None

    async def _read(self, create: _Create) -> Reading:
        reading = await off_loop(self.edge.dialect.read, create.frame)
        if reading.request.background:
            raise InvalidRequest("A response over a WebSocket cannot run in the background.", param="background")
        return self.edge.enveloped(self.request, replace(reading, generates=create.event.generates))

    async def _stream(self, lane: str | None, wire: Wire, opened: Opened, started: float, sent: int) -> Run:
        """Send the events of a response to a request of ``sent`` bytes to its end, and return its run.

        Only errors that keep the response from beginning are raised.
        """
        resolved = opened.request
        response, owner = resolved.facts.response, resolved.facts.origin.owner
        is_open = metrics.STREAMS_OPEN.labels("websocket").track_inprogress()
        async with aclosing(self.scheduler.run(opened, "websocket")) as running:
            delivery = Delivery(running, Beginning(self.edge.dialect.name, resolved.facts.model, started))
            with is_open, opened.sending():
                await delivery.begin()
                if (run := self.scheduler.runs.get(response.id, owner)) is None:
                    raise RuntimeError("a response that has begun is among the live ones")
                self._steers.begin(lane, run, resolved.facts)
                join(outlet=_Lane(self, lane, wire))
                async with wire.translated(delivery.events()) as events:
                    if wire.outgoing is None and may_be_long(resolved, sent):
                        async with aclosing(events_in_pieces(events)) as written:
                            await self._send(lane, wire, written)
                    else:
                        await self._send(lane, wire, events)
        if not delivery.has_ended:
            raise RuntimeError("the stream ended without a terminal event")
        return run

    # Sending

    async def _send(self, lane: str | None, wire: Wire, events: AsyncIterator[Any]) -> None:
        async for event in events:
            await self._write(with_lane(wire.json(event), lane))

    @property
    def is_ready(self) -> bool:
        """True if the client is there and reads."""
        transport = self.request.transport
        return not (transport is None or transport.is_closing() or self._is_stalled or self.socket.closed)

    def write_at_once(self, frame: bytes) -> None:
        """Write a frame to a connection that `is_ready`."""
        self._sent_at = monotonic()
        until_it_waits(self.socket.send_frame(frame, WSMsgType.TEXT))

    async def _write(self, frame: bytes) -> None:
        """Write a frame, waiting if the client reads slowly."""
        self._sent_at = monotonic()
        await self.socket.send_frame(frame, WSMsgType.TEXT)
        if len(frame) >= LONG_FRAME:  # it took a while to encode, and so may the next
            await asyncio.sleep(0)

    async def _refuse_create(
        self, event: ClientEvent, lane: str | None, error: Exception, started: float | None = None
    ) -> None:
        """Refuse a request; its lane forgets the response that the request continues."""
        self.memory.forget(lane, event.previous_response_id)
        await self._refuse(answer_to(self.request, error), lane, started)

    async def _refuse(
        self, answer: web.Response, lane: str | None, started: float | None = None, model: str = ""
    ) -> None:
        """Send the error of an answer, which has no response."""
        headers = self.scheduler.admission.headers(self.request[OWNER])
        if retry := answer.headers.get("Retry-After"):
            headers["retry-after"] = retry
        event = ErrorEvent(answer.status, answer[PROBLEM], headers or UNSET, UNSET if lane is None else lane)
        log_exchange(self.request, answer, started or monotonic(), model)
        await self._write(frame_of(event))

    async def _tell(self, lane: str | None, events: Sequence[SteerEvent]) -> None:
        """Send events about steering, and stop holding input that goes back to the client."""
        for event in events:
            if isinstance(event, SteerFailed):
                self._release(event.steer.id)
            await self._write(with_lane(frame_of(event), lane))

    async def _keep_alive(self) -> None:
        """Ping the client after each period of silence, so that no proxy closes the connection.

        A client that answers neither of two pings has gone, or does not read, and its connection is closed.
        """
        unanswered, period = 0, self.edge.keep_alive
        while True:
            silence = monotonic() - self._sent_at
            if silence >= period:
                unanswered = unanswered + 1 if self._is_silent else 0
                if unanswered == MOST_UNANSWERED:
                    break
                self.incoming.was_heard = False
                self._sent_at, silence = monotonic(), 0.0
                self._write_control(PING)
            await asyncio.sleep(period - silence)
        logger.info("A connection is closed, as its client answers no ping")
        self._write_control(UNANSWERED)
        self._abort()

    @property
    def _is_silent(self) -> bool:
        """True if nothing came since the last ping, though this server was reading, or the client was not."""
        return not self.incoming.was_heard and (not self.incoming.is_paused or self._is_stalled)

    @property
    def _is_stalled(self) -> bool:
        """True if the client has not read what was sent."""
        return self.incoming.protocol.writing_paused

    def _write_control(self, frame: bytes) -> None:
        """Write a control frame, unless it would have to wait for the client."""
        if self.is_ready and self.request.transport:
            self.request.transport.write(frame)

    # Ending

    async def _close(self, code: WSCloseCode, reason: bytes) -> None:
        """Close the connection, without waiting long for a client that does not read."""
        closing = asyncio.create_task(self.socket.close(code=code, message=reason))
        _, late = await asyncio.wait((closing,), timeout=2 * CLOSE_WAIT)
        if late:
            self._abort()

    def _abort(self) -> None:
        if self.request.transport:
            self.request.transport.abort()

    def _expire(self) -> None:
        """Take no new requests, and close the connection once it is idle."""
        self._is_expired = True
        if self._lanes.is_idle:
            task = asyncio.create_task(self._close_expired())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _close_expired(self) -> None:
        with suppress(ConnectionResetError):  # the client has left
            await self._refuse(answer_to(self.request, ConnectionExpired()), None)
            await self._close(WSCloseCode.OK, b"")

    async def _leave(self) -> None:
        """Cancel all responses of the client, those that wait included."""
        for create in self._lanes.clear():
            self._release(create)
        for held in tuple(self._unread):
            self._release(held)
        self.memory.clear()
        if self._tasks:
            metrics.DISCONNECTS.labels("websocket").inc()
        while tasks := tuple(self._tasks):  # the last response of an expired connection begins a task to close it
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def _continuing(request: CreateResponse, history: History | None) -> CreateResponse:
    """Return the request with the history that it continues."""
    if history is None:
        return request
    return request.inside(replace(request.envelope, continued=history))


@dataclass(slots=True)
class _Lane:
    """A lane as the outlet of its response's hot path."""

    _connection: Connection
    _name: str | None
    _wire: Wire

    @property
    def is_ready(self) -> bool:
        return self._connection.is_ready

    def put(self, event: Any) -> None:
        self._connection.write_at_once(with_lane(self._wire.json(event), self._name))
