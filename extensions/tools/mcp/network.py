"""HTTP for MCP servers, limited to permitted addresses and to messages of bounded size.

A host name is resolved here, each address is checked, and the connection goes to a checked address, not to the name.
So DNS cannot change the target between check and connection.  Redirects are covered too, as each of them opens a
connection in the same way.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias, cast

import httpcore2
import httpx2

from penstock.extensions.tools.mcp.incoming import bound
from penstock.pipeline.foreign_errors import named_error
from penstock.services.web.ssrf import AllowedNetworks, Blocked, check_address

CONNECTING = 10.0
"""Seconds in which a connection must be made."""
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
        headers={"Accept-Encoding": "identity", **headers},
        timeout=httpx2.Timeout(CONNECTING, read=READING),
        event_hooks={"response": [note, bound]},
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
            raise httpcore2.ConnectError(named_error(error)) from error

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
            with suppress(httpcore2.ConnectError, httpcore2.ConnectTimeout):  # the next address may answer
                return await self._inner.connect_tcp(address, port, _TRY)
        return await self._inner.connect_tcp(addresses[-1], port)
