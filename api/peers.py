"""The servers that share one store: the membership of this server, and requests to the others.

Only the server that runs a response has its live events.  If a client asks another server to stream, cancel or delete
it, that server forwards the client's request to the running one, and passes the bytes of the answer back unchanged.
Any failure on the way is raised as `PeerLost`; the caller then looks the response up again, as it may have moved.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from math import inf
from time import monotonic
from typing import Self
from urllib.parse import quote

import msgspec
from aiohttp import (
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    StreamReader,
    TCPConnector,
    web,
)
from yarl import URL

from penstock.api.http.access_log import MODEL
from penstock.api.http.agent_sessions import AGENTS
from penstock.api.http.conventions import conventions_of
from penstock.api.http.errors import STREAMING
from penstock.api.http.prefix import mount_of
from penstock.pipeline.errors import ContainerElsewhere, ServerUnreachable, StoreFailed
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.protocol.events import TERMINAL_TYPES
from penstock.pipeline.protocol.params.json_body import NO_JSON
from penstock.pipeline.protocol.sse import EventSplitter
from penstock.pipeline.tasks import cancelled
from penstock.pipeline.urls import shown_url
from penstock.services import tracing
from penstock.services.engines.affinity import SESSION_HEADER
from penstock.services.foreign import read_whole
from penstock.services.store.heartbeats import STALE, Servers
from penstock.services.store.stored import Server

logger = logging.getLogger(__name__)

FORWARDED = "X-Penstock-Forwarded"
"""The header of a request that another server forwarded; it is not forwarded again."""

MODEL_HEADER = "X-Penstock-Model"
"""The header with the model of a request that is passed on, for a body that names none."""

CONNECT_TIMEOUT = 2.0
"""Seconds to wait for a connection to another server."""

ANSWER_TIMEOUT = 10.0
"""Seconds to wait for an answer that is not a stream."""

LARGEST_RELAYED = 256 * 2**20
"""Bytes of an answer, or of an event, that is passed on."""

RELAYED_HEADERS = ("Content-Type", "Retry-After")
"""The headers of an answer that are passed on; the others belong to the connection between the servers."""

PASSED_ON = (*RELAYED_HEADERS, "Cache-Control", "Content-Disposition", "X-Accel-Buffering", "X-Content-Type-Options")
"""The headers of an answer to a request about a container, or to one whose container another server has."""

OF_BODIES = (
    *("Content-Type", "X-Request-Id", "X-Penstock-Record", "anthropic-version", "anthropic-beta"),
    *(SESSION_HEADER, *AGENTS),
)
"""The headers that a request with a body is passed on with, besides those with the key."""


class PeerLost(Exception):
    """The other server cannot be reached, cannot answer, or broke off its answer."""


class SseRelay:
    """A state machine that cuts the bytes of a relayed stream into whole frames, and keeps track of the last event."""

    def __init__(self, after: int = -1) -> None:
        self.last = after
        """The sequence number of the last whole event that the client has; -1 if none."""
        self.ended = False
        """True if the last whole event was a terminal one."""
        self._blocks = EventSplitter(LARGEST_RELAYED)

    def resume(self) -> None:
        """Drop the partial frame that a broken connection left."""
        self._blocks = EventSplitter(LARGEST_RELAYED)

    def feed(self, data: bytes) -> bytes:
        """Return the frames that ``data`` completes, without the final `DONE`, which `send` writes itself.

        Raises `ValueError`, or for deep nesting `RecursionError`, if they are no events.
        """
        frames, last = list[bytes](), None
        for frame in self._blocks.feed(data):
            if frame.data != b"[DONE]":
                frames.append(frame.raw)
                last = frame.data or last
        if last is not None:
            event = _decode(last)
            self.last, self.ended = event.sequence_number, event.type in TERMINAL_TYPES
        return b"".join(frames)


class _EventHead(msgspec.Struct):
    type: str
    sequence_number: int


_decode = msgspec.json.Decoder(_EventHead).decode


class Peers:
    """Requests to the other servers, over connections that are kept open.

    Callers retry a server that cannot be reached for ``patience`` seconds: by then it is back, or considered dead.  A
    stream counts as lost after ``silence`` seconds without data: a live server would have sent a keep-alive comment.
    """

    def __init__(self, patience: float = 20.0, silence: float = 60.0, siblings: Sequence[str] = ()) -> None:
        self.patience = patience
        self.siblings = siblings
        """The URLs of the other frontends of this server, which may run responses that are not stored."""
        self.silence = silence
        self._session: ClientSession | None = None

    async def close(self, _: web.Application) -> None:
        """Close all connections, once the application no longer answers requests."""
        if self._session is not None:
            await self._session.close()

    async def search(self, request: web.Request, response_id: str) -> Server | None:
        """Return the sibling that runs a response, or None."""
        timeout = ClientTimeout(ANSWER_TIMEOUT, sock_connect=CONNECT_TIMEOUT)
        path = URL(f"/v1/responses/{quote(response_id, safe='')}", encoded=True)
        for url in self.siblings:
            server = Server("", url, is_alive=True)
            with suppress(PeerLost), _losses():  # a frontend that has died runs nothing
                async with self._request(request, server, path, timeout, "GET") as answer:
                    if answer.status == HTTPStatus.OK:
                        return server
        return None

    async def forward(self, request: web.Request, server: Server) -> web.Response:
        """Forward a request, which has no body, and return the answer.

        Raises `PeerLost` if no answer comes, or one with a 5xx status, as the server then cannot answer either.
        """
        timeout = ClientTimeout(ANSWER_TIMEOUT, sock_connect=CONNECT_TIMEOUT)
        with _losses():
            async with self._request(request, server, request.rel_url, timeout) as answer:
                if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise PeerLost(f"{shown_url(server.url)} answers {answer.status}")
                headers = {name: answer.headers[name] for name in RELAYED_HEADERS if name in answer.headers}
                body = await read_whole(answer.content.iter_any(), LARGEST_RELAYED)
                return web.Response(status=answer.status, body=body, headers=headers)

    async def follow(self, request: web.Request, elsewhere: ContainerElsewhere) -> web.StreamResponse:
        """Pass a request with its body on to the server that has its container, and its answer back.

        Raises the error if it may not be passed on, and `ServerUnreachable` if no answer begins.
        """
        if FORWARDED in request.headers or request.get(STREAMING) or elsewhere.stays:
            raise elsewhere
        server, timeout = Server("", elsewhere.url, is_alive=True), ClientTimeout(sock_connect=CONNECT_TIMEOUT)
        body = elsewhere.body or (request.content if request.body_exists else None)
        try:
            async with self._request(request, server, request.rel_url, timeout, data=body) as answer:
                headers = {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}
                relayed = web.StreamResponse(status=answer.status, headers=headers)
                request[STREAMING] = True
                await relayed.prepare(request)
                async for data in answer.content.iter_any():
                    await relayed.write(data)
                await relayed.write_eof()
                return relayed
        except (ClientError, TimeoutError, ValueError) as error:
            if request.get(STREAMING):
                raise ConnectionResetError from error
            raise ServerUnreachable from error

    async def serves(self, request: web.Request, url: str, model: str) -> bool:
        """Return False if the server at ``url`` does not serve a model; one that does not answer may serve it."""
        timeout = ClientTimeout(ANSWER_TIMEOUT, sock_connect=CONNECT_TIMEOUT)
        path = URL(f"/v1/models/{quote(model, safe='')}", encoded=True)
        with suppress(PeerLost), _losses():
            async with self._request(request, Server("", url, is_alive=True), path, timeout, "GET") as answer:
                return answer.status != HTTPStatus.NOT_FOUND
        return True

    async def frames(self, request: web.Request, server: Server, relayed: SseRelay) -> AsyncGenerator[bytes, None]:
        """Forward a request for a stream, and yield the frames after the last one that was ``relayed``.

        Raises `PeerLost` if the stream breaks off before its terminal event.
        """
        relayed.resume()
        url = request.rel_url.without_query_params("starting_after")
        if relayed.last >= 0:
            url = url.update_query(starting_after=relayed.last)
        timeout = ClientTimeout(sock_connect=CONNECT_TIMEOUT, sock_read=self.silence)
        with _losses():
            async with self._request(request, server, url, timeout) as answer:
                if answer.status != HTTPStatus.OK:
                    raise PeerLost(f"{shown_url(server.url)} answers {answer.status}")
                async for data in answer.content.iter_any():
                    if frames := relayed.feed(data):
                        yield frames
        if not relayed.ended:
            raise PeerLost(f"{shown_url(server.url)} has broken off")

    def _request(
        self,
        request: web.Request,
        server: Server,
        url: URL,
        timeout: ClientTimeout,
        method: str = "",
        data: bytes | StreamReader | None = None,
    ) -> AbstractAsyncContextManager[ClientResponse]:
        """Send the client's request on to ``server``; of its headers, only those with the key are sent.

        With a body, those that the dialects read are sent, too.
        """
        if self._session is None:
            # No limit, as streams are many and long; no cookies, as they would mix the requests of different clients.
            self._session = ClientSession(connector=TCPConnector(limit=0), cookie_jar=DummyCookieJar())
        headers = {
            name: request.headers[name] for name in conventions_of(request).key_headers if name in request.headers
        }
        if data is not None:
            headers |= {name: request.headers[name] for name in OF_BODIES if name in request.headers}
            headers |= {MODEL_HEADER: quote(request[MODEL])} if MODEL in request else {}
        path = str(url).removeprefix(mount_of(request))  # the URL of the other server has its own
        return self._session.request(
            method or request.method,
            URL(server.url.rstrip("/") + path, encoded=True),
            headers={**headers, FORWARDED: "1", "Accept-Encoding": "identity", **tracing.current_headers({})},
            data=data,
            timeout=timeout,
            allow_redirects=False,
        )


@contextmanager
def _losses() -> Iterator[None]:
    try:
        yield
    except (ClientError, TimeoutError, *NO_JSON) as error:
        raise PeerLost(named_error(error)) from error


@dataclass
class Membership:
    """The membership of this server among the servers of a store, for the length of a block.

    Every ``heartbeat`` seconds the server records in the store that it is alive at ``url``.  Then ``recover`` takes
    care of the responses of servers that were silent for ``stale`` seconds, or ``release_lost`` gives up the responses
    that other servers have taken over from this one.
    """

    servers: Servers
    url: str
    recover: Callable[[], Awaitable[None]]
    release_lost: Callable[[], Awaitable[None]]
    heartbeat: float = 2.0
    stale: float = STALE

    async def __aenter__(self) -> Self:
        await self.servers.join(self.url)
        self._duty = asyncio.create_task(self._perform(self.recover))
        self._heartbeats = asyncio.create_task(self._keep_heartbeats())
        await self._duty
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancelled((self._heartbeats, self._duty))
        with suppress(StoreFailed):  # the others miss its heartbeats
            await self.servers.leave()

    async def _keep_heartbeats(self) -> None:
        steady_since = -inf
        while True:
            await asyncio.sleep(self.heartbeat)
            with suppress(StoreFailed):  # the store logs its outages itself
                if not await self.servers.go_on():
                    steady_since = monotonic()
                    # what looks for dead servers finds none as long as this one looks dead as well
                    await asyncio.wait((self._duty,), timeout=self.stale / 2)
                    await self.servers.beat()
                self._take_care_of_peers(monotonic() - steady_since)

    def _take_care_of_peers(self, steady: float) -> None:
        """Take care of dead servers, unless this server itself was silent in the last seconds.

        In that case the others may only look dead, for the same reason, such as an outage of the database.  Instead,
        the server lets go of what they took over in the meantime.
        """
        if self._duty.done():
            task = self.recover if steady > self.stale / 2 else self.release_lost
            self._duty = asyncio.create_task(self._perform(task))

    async def _perform(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except StoreFailed as error:
            logger.warning("The store failed, so the responses of dead servers are looked for later: %s", error)
        except Exception:
            logger.exception("A bug in the recovery of other servers' responses")
