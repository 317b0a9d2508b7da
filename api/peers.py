"""The servers that share one store: this one among them, and the others as its clients see them through it.

A live response is told by the server that makes it.  Whoever asks another server for its stream, or to cancel it, is
answered by the first through the second: the client's own request goes on, and the answer's bytes come back as they
are.  Whatever breaks on the way is `PeerLost`, and then the store knows more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from math import inf
from time import monotonic
from typing import Self

import msgspec
from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web
from yarl import URL

from penstock.pipeline.errors import StoreFailed
from penstock.pipeline.protocol.events import DONE
from penstock.stages.services.store.servers import STALE, Servers
from penstock.stages.services.store.stored import Server

logger = logging.getLogger(__name__)

FORWARDED = "X-Penstock-Forwarded"
"""The header of a request that came through another server: it goes no further."""

CONNECT = 2.0
"""Seconds in which a server takes a connection."""

ANSWER = 10.0
"""Seconds in which a server answers what is no stream."""

TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})

KEPT = ("Content-Type", "Retry-After")
"""The headers of an answer that are its own, and not its connection's."""

_DATA = b"\ndata: "


class PeerLost(Exception):
    """The other server cannot be reached, or has broken off."""


class Relayed:
    """How far a stream of events that comes in pieces has come; a machine."""

    def __init__(self, after: int = -1) -> None:
        self.last = after
        """The number of the last whole event."""
        self.ended = False
        """Whether that was the last event of all."""
        self._rest = bytearray()

    def resume(self) -> None:
        """Forget the piece of a frame that a broken connection has left."""
        self._rest.clear()

    def feed(self, data: bytes) -> bytes:
        """The frames that are whole now, without what comes behind the last event."""
        known = len(self._rest)
        self._rest += data
        end = self._rest.rfind(b"\n\n", max(known - 1, 0))
        if end < 0:
            return b""
        whole = bytes(self._rest[: end + 2]).removesuffix(DONE)
        del self._rest[: end + 2]
        if (event := whole.rfind(_DATA)) >= 0:
            told = _decode(whole[event + len(_DATA) : whole.index(b"\n\n", event)])
            self.last, self.ended = told.sequence_number, told.type in TERMINAL
        return whole


class _Told(msgspec.Struct):
    type: str
    sequence_number: int


_decode = msgspec.json.Decoder(_Told).decode


class Peers:
    """The other servers, over connections that are kept.

    One that cannot be reached is waited for so many seconds of ``patience``: by then it is back, or taken for dead.  A
    stream is lost after so many of ``silence``, in which any server writes a keep-alive comment.
    """

    def __init__(self, patience: float = 20.0, silence: float = 60.0) -> None:
        self.patience = patience
        self.silence = silence
        self._session: ClientSession | None = None

    async def close(self, _: web.Application) -> None:
        """Let go of all connections, when the application answers nothing any more."""
        if self._session is not None:
            await self._session.close()

    async def forward(self, request: web.Request, server: Server) -> web.Response:
        """What a server answers to a request without a body; raises `PeerLost`, also where it cannot answer."""
        timeout = ClientTimeout(ANSWER, sock_connect=CONNECT)
        with _losses():
            async with self._asked(request, server, request.rel_url, timeout) as answer:
                if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise PeerLost(f"{server.url} answers {answer.status}")
                kept = {name: answer.headers[name] for name in KEPT if name in answer.headers}
                return web.Response(status=answer.status, body=await answer.read(), headers=kept)

    async def frames(self, request: web.Request, server: Server, relayed: Relayed) -> AsyncGenerator[bytes, None]:
        """The frames of the stream that a request is for, behind what was ``relayed`` of it before.

        Raises `PeerLost` where the stream breaks off ahead of its last event.
        """
        relayed.resume()
        url = request.rel_url.without_query_params("starting_after")
        if relayed.last >= 0:
            url = url.update_query(starting_after=relayed.last)
        timeout = ClientTimeout(sock_connect=CONNECT, sock_read=self.silence)
        with _losses():
            async with self._asked(request, server, url, timeout) as answer:
                if answer.status != HTTPStatus.OK:
                    raise PeerLost(f"{server.url} answers {answer.status}")
                async for data in answer.content.iter_any():
                    if frames := relayed.feed(data):
                        yield frames
        if not relayed.ended:
            raise PeerLost(f"{server.url} has broken off")

    def _asked(
        self, request: web.Request, server: Server, url: URL, timeout: ClientTimeout
    ) -> AbstractAsyncContextManager[ClientResponse]:
        """The client's request, sent on to that server."""
        if self._session is None:
            # Streams are many and long, and nothing that one client says may come along with the request of another.
            self._session = ClientSession(connector=TCPConnector(limit=0), cookie_jar=DummyCookieJar())
        headers = {name: request.headers[name] for name in ("Authorization",) if name in request.headers}
        return self._session.request(
            request.method,
            URL(server.url.rstrip("/") + str(url), encoded=True),
            headers=headers | {FORWARDED: "1"},
            timeout=timeout,
            allow_redirects=False,
        )


@contextmanager
def _losses() -> Iterator[None]:
    """Call whatever happens on the way to another server by one name."""
    try:
        yield
    except (ClientError, TimeoutError, msgspec.DecodeError) as error:
        raise PeerLost(str(error)) from error


@dataclass
class Membership:
    """This server as one of those that share the store, for the length of a block.

    It says every ``heartbeat`` seconds that it lives, at a ``url`` where the others reach it.  ``settle`` ends what
    those have left that were silent for ``stale`` seconds, and ``let_go`` what others have taken over from this one.
    """

    servers: Servers
    url: str
    settle: Callable[[], Awaitable[None]]
    let_go: Callable[[], Awaitable[None]]
    heartbeat: float = 2.0
    stale: float = STALE

    async def __aenter__(self) -> Self:
        await self.servers.join(self.url)
        self._looking = asyncio.create_task(self._done(self.settle))
        self._beating = asyncio.create_task(self._keep_beating())
        await self._looking
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = (self._beating, self._looking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(StoreFailed):
            await self.servers.leave()

    async def _keep_beating(self) -> None:
        steady_since = -inf
        while True:
            await asyncio.sleep(self.heartbeat)
            with suppress(StoreFailed):  # the store has said so itself
                if not await self.servers.beat():
                    steady_since = monotonic()
                self._look_around(monotonic() - steady_since)

    def _look_around(self, steady: float) -> None:
        """See who is dead, unless this server was silent some seconds ago, and others may look dead for its reason."""
        if self._looking.done():
            duty = self.settle if steady > self.stale / 2 else self.let_go
            self._looking = asyncio.create_task(self._done(duty))

    async def _done(self, duty: Callable[[], Awaitable[None]]) -> None:
        try:
            await duty()
        except StoreFailed as error:
            logger.warning("What the servers have left to each other is looked for later: %s", error)
        except Exception:
            logger.exception("A duty towards the other servers met a bug")
