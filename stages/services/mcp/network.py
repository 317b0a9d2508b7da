"""HTTP for MCP servers: only to addresses that may be connected to, and never more than can be held.

A name is resolved here, each of its addresses is checked, and one that passed is connected to: between the check and
the connection there is nothing to be changed.  That holds for redirects as well, as each of them connects anew.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias, cast

import httpcore2
import httpx2

from penstock.stages.services.web.ssrf import AllowedNetworks, Blocked, check_address

LARGEST = 16 * 2**20
"""Bytes of an answer, or of an event of a stream."""

CONNECTING = 10.0
READING = 600.0
"""Seconds without a byte; streams are silent while a tool runs."""

_TRY = 3.0
"""Seconds for one of several addresses."""

_TLS = httpx2.create_ssl_context()
"""Made once, as it reads all certificates of the machine."""

Note: TypeAlias = Callable[[httpx2.Response], Awaitable[None]]


def http_client(headers: Mapping[str, str], note: Note, allowed: AllowedNetworks | None = None) -> httpx2.AsyncClient:
    """A client that sends these ``headers`` with every request, and has ``note`` look at every response.

    With ``allowed`` it connects to public addresses and to those; without it to all, by the proxies of the environment.
    """
    return httpx2.AsyncClient(
        headers=dict(headers),
        timeout=httpx2.Timeout(CONNECTING, read=READING),
        event_hooks={"response": [note]},
        verify=_TLS,
        trust_env=allowed is None,
        transport=None if allowed is None else GuardedTransport(allowed),
    )


class GuardedTransport(httpx2.AsyncHTTPTransport):
    """HTTP by way of a `GuardedBackend`, for servers that nobody here knows."""

    def __init__(self, allowed: AllowedNetworks) -> None:
        super().__init__(verify=_TLS, trust_env=False)
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=_TLS,
            max_connections=None,  # each call that runs has one, and none may wait for another's end
            network_backend=GuardedBackend(allowed),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, and bound what comes back; streams of events are bounded where they are read."""
        request.headers["Accept-Encoding"] = "identity"  # compressed, a few bytes may be any number of them
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.DecodingError("compressed, which was not asked for")
        if isinstance(response.stream, httpx2.AsyncByteStream) and not _is_event_stream(response):
            response.stream = _Bounded(response.stream)
        return response


def _is_event_stream(response: httpx2.Response) -> bool:
    return response.headers.get("content-type", "").lower().startswith("text/event-stream")


class _Bounded(httpx2.AsyncByteStream):
    """As much of a body as can be held."""

    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._inner:
            if (size := size + len(chunk)) > LARGEST:
                raise httpx2.StreamError(f"more than {LARGEST} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


class GuardedBackend(httpcore2.AsyncNetworkBackend):
    """Connects to public addresses, and to those that are allowed."""

    def __init__(self, allowed: AllowedNetworks) -> None:
        self._allowed = allowed
        self._inner = cast("httpcore2.AsyncNetworkBackend", httpcore2.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the interface has it
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to one of the host's addresses."""
        try:
            async with asyncio.timeout(timeout):
                return await self._first(await self._addresses(host, port), port)
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout from error
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error

    async def _addresses(self, host: str, port: int) -> list[str]:
        """Those of its addresses that may be connected to; raises `Blocked` where there is none."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if self._allowed.names(host):
            return addresses
        passed, blocked = [], Blocked("no address")
        for address in addresses:
            try:
                check_address(address, self._allowed)
                passed.append(address)
            except Blocked as error:
                blocked = error
        if not passed:
            raise blocked
        return passed

    async def _first(self, addresses: list[str], port: int) -> httpcore2.AsyncNetworkStream:
        """The first of some addresses that answers."""
        for address in addresses[:-1]:
            with suppress(httpcore2.ConnectError, httpcore2.ConnectTimeout):
                return await self._inner.connect_tcp(address, port, _TRY)
        return await self._inner.connect_tcp(addresses[-1], port)
