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
from ipaddress import IPv6Address, ip_address
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from penstock.api.http.errors import as_error

HEADER_SECONDS = 30.0
"""Seconds in which the headers of the first request of a connection must arrive."""

IDLE_SECONDS = 75.0
"""Seconds until the next request of a connection: proxies keep one for 60 s, and should be the first to close it."""

LINGERING_SECONDS = 2.0
"""Seconds for which the rest of an unread body is received, so that the client reads the answer before a reset."""

MOST_DESCRIPTORS = 65_536
"""The open files to have if the hard limit allows: far more connections than one process can serve."""

logger = logging.getLogger(__name__)


class ClientConnection(web.RequestHandler):
    """A connection that is closed if its first headers are late, and that answers broken HTTP in JSON."""

    __slots__ = ("_header_timer",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._header_timer = loop.call_later(HEADER_SECONDS, self._close_without_request)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._header_timer.cancel()
        super().connection_lost(exc)

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer a request that cannot be parsed; the middleware answers all other errors."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        logger.info("%s sent a request that is not valid HTTP", request.remote)
        answer = as_error(status, "The request is not valid HTTP.")
        answer.force_close()
        return answer

    def _close_without_request(self) -> None:
        if self._request_count == 0:
            self.force_close()


class ConnectionServer(web.Server):
    """The server of all connections; one client address or IPv6 subnet may hold ``most`` of them at once."""

    def __init__(self, handler: Any, *, most: int, **options: Any) -> None:
        super().__init__(handler, **options)
        self._most = most
        self._clients = dict[web.RequestHandler, str]()
        self._by_client = Counter[str]()
        self._refused = set[str]()

    def __call__(self) -> web.RequestHandler:
        return ClientConnection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Count a connection, or close it if its client has too many; log that once until the client has none."""
        super().connection_made(handler, transport)
        client = self._clients[handler] = client_of(transport)
        self._by_client[client] += 1
        if self._by_client[client] > self._most:
            transport.abort()
            if client not in self._refused:
                self._refused.add(client)
                logger.warning("%s has %d connections: more are closed", client, self._most)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        client = self._clients.pop(handler)
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]
            self._refused.discard(client)


def client_of(transport: asyncio.BaseTransport) -> str:
    """Return the address of a client, or its /64 subnet with IPv6, all addresses of which one client may have."""
    peer = transport.get_extra_info("peername")
    if not peer:  # the client has left already
        return ""
    address = ip_address(peer[0].partition("%")[0])
    if not isinstance(address, IPv6Address):
        return str(address)
    return str(address.ipv4_mapped or f"{IPv6Address(int(address) >> 64 << 64)}/64")


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

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return ConnectionServer(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            most=max(raise_descriptor_limit() // 2, 1),
            **made._kwargs,  # noqa: SLF001 - aiohttp has no public way to choose the class of its server
        )


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

    Binding before the model is loaded reports a used port early.  Until the socket listens, connections are refused.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    return bound


@asynccontextmanager
async def serving(app: web.Application, bound: socket.socket) -> AsyncGenerator[None, None]:
    """Serve ``app`` on a socket for the length of the block."""
    runner = Runner(app)
    await runner.setup()
    try:
        await web.SockSite(runner, bound).start()
        yield
    finally:
        await runner.cleanup()
