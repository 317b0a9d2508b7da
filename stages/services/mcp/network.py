"""HTTP for MCP servers, limited to permitted addresses and to bodies of bounded size.

A host name is resolved here, each address is checked, and the connection goes to a checked address, not to the name.
So DNS cannot change the target between check and connection.  Redirects are covered too, as each of them opens a
connection in the same way.
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
"""Maximum bytes of a response body, or of one event of a stream."""

CONNECTING = 10.0
READING = 600.0
"""Seconds without a byte before a read times out.  It is long, as streams are silent while a tool runs."""

_TRY = 3.0
"""Seconds to try each address of a host before the next one.  The last one has the remaining time."""

_TLS = httpx2.create_ssl_context()
"""Created once, because that loads all root certificates."""

Note: TypeAlias = Callable[[httpx2.Response], Awaitable[None]]


def http_client(headers: Mapping[str, str], note: Note, allowed: AllowedNetworks | None = None) -> httpx2.AsyncClient:
    """Return a client that sends ``headers`` with each request and calls ``note`` with each response.

    With ``allowed``, it connects only to public and to allowed addresses.  Without, it connects to any address, and
    uses the proxies set in the environment.
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
    """HTTP over a `GuardedBackend`, for servers named by clients, which the operator does not know."""

    def __init__(self, allowed: AllowedNetworks) -> None:
        super().__init__(verify=_TLS, trust_env=False)
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=_TLS,
            max_connections=None,  # one for each running call: none may wait for another
            network_backend=GuardedBackend(allowed),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, and limit the size of the body.  The events of a stream are limited by its reader."""
        request.headers["Accept-Encoding"] = "identity"  # a few compressed bytes may expand to gigabytes
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
    """A body that raises `httpx2.StreamError` after `LARGEST` bytes."""

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
    """A network backend that connects only to public and to allowed addresses."""

    def __init__(self, allowed: AllowedNetworks) -> None:
        self._allowed = allowed
        self._inner = cast("httpcore2.AsyncNetworkBackend", httpcore2.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - required by the interface
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                return await self._first(await self._addresses(host, port), port)
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout from error
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error

    async def _addresses(self, host: str, port: int) -> list[str]:
        """Return the host's permitted addresses: all of them if the operator allows the host by name.

        Raises `Blocked` if there are none.
        """
        entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
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
        for address in addresses[:-1]:
            with suppress(httpcore2.ConnectError, httpcore2.ConnectTimeout):
                return await self._inner.connect_tcp(address, port, _TRY)
        return await self._inner.connect_tcp(addresses[-1], port)
