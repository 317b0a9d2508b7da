"""The socket of the server and its connections: limits of time and number, and answers to what is not HTTP.

aiohttp does not close a connection whose headers never end, and does not limit how many a client opens.  Both would
let one client without a key use up the file descriptors of the server.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from penstock.api.http.bodies import Problem
from penstock.api.http.errors import INVALID, as_error
from penstock.api.http.proxied import MOST_OF_CLIENT
from penstock.api.http.proxies import PROXIES, Address, Proxies, client_of, parsed_address
from penstock.pipeline.errors import CannotStart

HEADER_SECONDS = 30.0
"""Seconds in which the headers of the first request of a connection must arrive."""

IDLE_SECONDS = 75.0
"""Seconds until the next request of a connection: proxies keep one for 60 s, and should be the first to close it."""

LINGERING_SECONDS = 2.0
"""Seconds for which the rest of an unread body is received, so that the client reads the answer before a reset."""

MOST_DESCRIPTORS = 65_536
"""The open files to have if the hard limit allows: far more connections than one process can serve."""

MOST_RESERVED = 256
"""The most descriptors that are kept from connections, for the engine, the store and the tools."""

WARNING_SECONDS = 60.0
"""Seconds between two warnings about closed connections: the clients that cause them may be an attack."""

BACKLOG = 2048
"""Connections that wait until the event loop accepts them; of more that come at once, clients see some reset."""

logger = logging.getLogger(__name__)


class ClientConnection(web.RequestHandler):
    """A connection that answers broken HTTP in JSON."""

    __slots__ = ()

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer a request that cannot be parsed; the middleware answers all other errors."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        logger.info("%s sent a request that is not valid HTTP", request.remote)
        answer = as_error(status, Problem("The request is not valid HTTP.", INVALID, None, None))
        answer.force_close()
        return answer

    @property
    def is_silent(self) -> bool:
        """True if the connection is open, and the headers of its first request are not complete."""
        return self._request_count == 0 and self.transport is not None


@dataclass
class ConnectionBounds:
    """The most connections of one client, and the most descriptors that may be in use for another connection."""

    per_client: int
    in_use: int

    @classmethod
    def within(cls, descriptors: int) -> Self:
        """Return the bounds of a process that may have this number of descriptors."""
        return cls(max(descriptors // 2, 1), descriptors - min(descriptors // 4, MOST_RESERVED))


@dataclass
class ConnectionCounts:
    """The connections of a server: those that are open, and those that it has closed at once since its start."""

    open: int = 0
    closed_of_client: int = 0
    """Connections of a client that had too many."""
    closed_of_all: int = 0
    """Connections without a request, which were closed because few descriptors were left."""


class ConnectionServer(web.Server):
    """The server of all connections; those that exceed its bounds are closed.

    A client is an address or an IPv6 subnet.  A trusted proxy is no client: its requests are counted by those that they
    are for.  If few descriptors are left, connections that have sent no request yet
    make room for new ones.  Otherwise the event loop would close new ones without a word in the log.
    """

    def __init__(
        self, handler: Any, *, bounds: ConnectionBounds, proxies: Proxies, counts: ConnectionCounts, **options: Any
    ) -> None:
        super().__init__(handler, **options)
        self._bounds = bounds
        self._proxies = proxies
        self._counts = counts
        self._clients = dict[web.RequestHandler, str]()
        self._maybe_silent = dict[ClientConnection, float]()
        """Connections that may have sent no request, the oldest first; each with the time when its headers are late."""
        self._timer: asyncio.TimerHandle | None = None  # one for all: one for each would take 700 bytes
        self._by_client = Counter[str]()
        self._silent_until = dict[str, float]()

    def __call__(self) -> web.RequestHandler:
        return ClientConnection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Count a connection, and close it if it exceeds a bound."""
        super().connection_made(handler, transport)
        peer = _peer(transport)
        client = self._clients[handler] = client_of(peer)
        self._by_client[client] += 1
        assert isinstance(handler, ClientConnection)
        self._maybe_silent[handler] = self._loop.time() + HEADER_SECONDS
        self._timer = self._timer or self._loop.call_later(HEADER_SECONDS, self._close_late)
        self._counts.open += 1
        most, in_use = self._bounds.per_client, max(self._counts.open, _descriptor(transport))
        if self._by_client[client] > most and not self._proxies.trusts(peer):
            transport.abort()
            self._counts.closed_of_client += 1
            message = "%s has %d connections, the most that one client may have: more are closed (%d so far)"
            self._warn(message, client, most, self._counts.closed_of_client)
        elif in_use > self._bounds.in_use:
            self._close_oldest_silent()
            self._counts.closed_of_all += 1
            message = (
                "%d files and connections are open, nearly all that are allowed:"
                " connections without a request are closed, the oldest first (%d so far)"
            )
            self._warn(message, in_use, self._counts.closed_of_all)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        assert isinstance(handler, ClientConnection)
        self._maybe_silent.pop(handler, None)
        client = self._clients.pop(handler)
        self._counts.open -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]

    def _close_late(self) -> None:
        """Close the connections whose first headers are late."""
        self._timer, now = None, self._loop.time()
        for handler, late_at in tuple(self._maybe_silent.items()):
            if late_at > now:
                self._timer = self._loop.call_at(late_at, self._close_late)
                return
            del self._maybe_silent[handler]
            if handler.is_silent:
                handler.force_close()

    def _close_oldest_silent(self) -> None:
        """Close the connection that has been without a request for the longest; it may be the new one."""
        while self._maybe_silent:
            handler = next(iter(self._maybe_silent))
            del self._maybe_silent[handler]
            if handler.is_silent:
                handler.force_close()
                return

    def _warn(self, message: str, *values: object) -> None:
        now = self._loop.time()
        if now >= self._silent_until.get(message, 0.0):
            self._silent_until[message] = now + WARNING_SECONDS
            logger.warning(message, *values)


def _descriptor(transport: asyncio.BaseTransport) -> int:
    """Return the descriptor of a connection: the lowest that was free, so that it tells how many are in use."""
    connection = transport.get_extra_info("socket")
    return connection.fileno() if connection else -1  # the client has left already


def _peer(transport: asyncio.BaseTransport) -> Address | None:
    peer = transport.get_extra_info("peername")
    return parsed_address(peer[0]) if peer else None  # the client has left already


class Runner(web.AppRunner):
    """The runner of an application whose connections are limited.

    Bodies are not decompressed, and an unread one is received for a moment only: inflating three gigabytes of blanks
    would stop the event loop for seconds.
    """

    def __init__(self, app: web.Application) -> None:
        super().__init__(
            app,
            handler_cancellation=True,  # off by default: a client that left would keep the engine busy
            shutdown_timeout=1,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=LINGERING_SECONDS,
        )
        self.counts = ConnectionCounts()
        self._bounds = ConnectionBounds.within(raise_descriptor_limit())
        self._proxies = app.get(PROXIES, Proxies())
        app[MOST_OF_CLIENT] = self._bounds.per_client

    async def _make_server(self) -> ConnectionServer:
        made = await super()._make_server()
        return ConnectionServer(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            bounds=self._bounds,
            proxies=self._proxies,
            counts=self.counts,
            **made._kwargs,  # noqa: SLF001 - aiohttp has no public way to choose the class of its server
        )


async def take(runner: Runner, connection: socket.socket) -> None:
    """Serve a connection that another process has accepted."""
    assert runner.server is not None
    try:
        await asyncio.get_running_loop().connect_accepted_socket(runner.server, connection)
    except OSError:  # the client has left already
        connection.close()


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files, which many systems set to 1,024, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY:
        return most
    if soft < most:
        with suppress(ValueError, OSError):  # macOS has a lower limit than the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return soft


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to its address but does not listen yet.

    Binding before the model is loaded reports a used port early.
    Raises `CannotStart` if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise _unusable(host, port, error) from error
    return bound


def listen(bound: socket.socket) -> None:
    """Let a socket accept connections; raise `CannotStart` if another process listens at its address by now."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _unusable(host, port, error) from error


def _unusable(host: str, port: int, error: OSError) -> CannotStart:
    return CannotStart(f"--host {host} --port {port}: {error.strerror}")


@asynccontextmanager
async def serving(app: web.Application, bound: socket.socket) -> AsyncGenerator[Runner, None]:
    """Serve ``app`` on a socket for the length of the block; yield the runner, which counts its connections."""
    runner = Runner(app)
    await runner.setup()
    try:
        await web.SockSite(runner, bound, backlog=BACKLOG).start()
        yield runner
    finally:
        await runner.cleanup()
