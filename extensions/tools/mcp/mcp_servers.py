"""MCP servers, configured by the operator or named by requests.

The operator's servers have one connection each, shared by all responses.  A server that a request names or sends
headers to gets a connection for each response, so that no client can use another's permissions.

The SDK takes half a second to import, so it is imported on first use, and in a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.extensions.tools.mcp.failures import CONNECTION_CLOSED, INVALID_PARAMS, McpFailure, protocol_failure
from penstock.extensions.tools.mcp.listings import Listing, Listings, Target, Tools
from penstock.pipeline.protocol.params.tools import FRAMING, is_web_url
from penstock.pipeline.protocol.tools import McpServer
from penstock.services.mcp_config import HttpServer, ServerConfig
from penstock.services.tools import ServerUnavailable, ToolResult
from penstock.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks

if TYPE_CHECKING:
    from penstock.extensions.tools.mcp.client import McpClient
    from penstock.extensions.tools.mcp.connection import McpConnection

logger = logging.getLogger(__name__)

FRESH = 300.0
"""Seconds for which a listing is cached."""

_NOT_THE_CLIENTS = FRAMING | {"content-type"}
"""Headers about the transfer of a message, which are dropped if a request names them."""


class McpServers:
    """The `McpHosts` implementation over the official SDK.  Listings are cached for ``fresh`` seconds."""

    def __init__(
        self, servers: Mapping[str, ServerConfig], allowed: AllowedNetworks = NOTHING_ALLOWED, *, fresh: float = FRESH
    ) -> None:
        self._servers = dict(servers)
        self._allowed = allowed
        self._listings = Listings(fresh)
        self._shared: dict[str, McpClient] = {}
        self._connections: set[McpConnection] = set()

    @property
    def labels(self) -> frozenset[str]:
        return frozenset(self._servers)

    async def tools(self, server: McpServer, seconds: float) -> Tools:
        return (await self.listing(server, seconds)).tools

    async def listing(self, server: McpServer, seconds: float) -> Listing:
        """Return the tools of a server and its instructions; raises `ServerUnavailable`."""
        try:
            target = self._target(server)
            return await self._listings.get(target.key, lambda: self._list(target, seconds))
        except McpFailure as failure:
            logger.info("The tools of the MCP server %s cannot be listed: %s", server.label, failure)
            raise ServerUnavailable(str(failure)) from None

    def session(self, server: McpServer) -> McpSession:
        """Return a session for one response.  If there is no such server, its calls fail."""
        try:
            return McpSession(self, self._target(server))
        except McpFailure as failure:
            return McpSession(self, failure)

    def private_session(self, server: McpServer, headers: Mapping[str, str]) -> McpSession:
        """Return a session with a connection of its own to an operator's server that keeps state for a response.

        The operator's headers take precedence over ``headers``, and these over the request's.
        """
        config = self._servers[server.label]
        if isinstance(config, HttpServer):
            config = _with_headers(_with_headers(config, headers), _sent_headers(server))
        return McpSession(self, replace(self._target(server), config=config, is_shared=False))

    async def client(self, target: Target) -> McpClient:
        """Return the client of a server: that of all responses, or a new one, which its user closes."""
        make_client = await asyncio.to_thread(_client_class)
        client = make_client(target, self._listings, self._connections)
        # Another call may have made the shared one while this one waited for its class.
        return self._shared.setdefault(target.key[0], client) if target.is_shared else client

    async def close(self) -> None:
        await self._listings.close()
        await asyncio.gather(*(client.close() for client in self._shared.values()))
        connections = tuple(self._connections)
        for connection in connections:
            connection.end()
        await asyncio.gather(*(connection.closed() for connection in connections))

    def _target(self, server: McpServer) -> Target:
        """Return the server that a request names; raise `McpFailure` if its URL is invalid or its label unknown."""
        headers = _sent_headers(server)
        if server.url is not None:
            if not is_web_url(server.url):
                raise protocol_failure(INVALID_PARAMS, "The server's URL must begin with http:// or https://.")
            return Target(HttpServer(server.url, headers), (server.url, _digest(headers)), allowed=self._allowed)
        label = server.configured_as
        if (config := self._servers.get(label)) is None:
            raise protocol_failure(INVALID_PARAMS, f"There is no MCP server {label} here.")
        if headers and isinstance(config, HttpServer):
            return Target(_with_headers(config, headers), (label, _digest(headers)))
        return Target(config, (label, b""), is_shared=True)

    async def _list(self, target: Target, seconds: float) -> Listing:
        client = await self.client(target)
        try:
            return await client.listing(seconds)
        finally:
            await client.let_go()


class McpSession:
    """A `Session` with one server; its first call makes a client, which ends with the session unless it is shared."""

    def __init__(self, servers: McpServers, target: Target | McpFailure) -> None:
        self._servers = servers
        self._target = target
        self._client: McpClient | None = None
        self._is_closed = False

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        try:
            return await self.call(name, arguments(text), seconds)
        except McpFailure as failure:
            return failure.outcome

    async def call(self, name: str, call_arguments: dict[str, Any], seconds: float) -> ToolResult:
        """Call a tool; raise `McpFailure` if there is no such server or the session is closed."""
        if isinstance(self._target, McpFailure):
            raise self._target
        client = self._client or await self._servers.client(self._target)
        if self._is_closed:
            raise protocol_failure(CONNECTION_CLOSED, "The response has ended.")
        self._client = self._client or client  # concurrent first calls may each make one; the others never connect
        return await self._client.call(name, call_arguments, seconds)

    async def close(self) -> None:
        self._is_closed = True
        if self._client is not None:
            await self._client.let_go()


def _client_class() -> type[McpClient]:
    from penstock.extensions.tools.mcp.client import McpClient  # noqa: PLC0415 - takes half a second

    return McpClient


def arguments(text: str) -> dict[str, Any]:
    """Decode the arguments that the model wrote; raise `McpFailure` if they are not a JSON object."""
    try:
        decoded = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise protocol_failure(INVALID_PARAMS, f"The arguments are not valid JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise protocol_failure(INVALID_PARAMS, "The arguments are not a JSON object.")
    return decoded


def _sent_headers(server: McpServer) -> dict[str, str]:
    """Return the headers that a request sends to a server, without those about the transfer of a message."""
    return {name: value for name, value in server.headers.reveal().items() if name.lower() not in _NOT_THE_CLIENTS}


def _with_headers(config: HttpServer, headers: Mapping[str, str]) -> HttpServer:
    """Add ``headers`` to an operator's server; the operator's own headers take precedence."""
    own = {name.lower() for name in config.headers}
    added = {name: value for name, value in headers.items() if name.lower() not in own}
    return replace(config, headers={**added, **config.headers})


def _digest(headers: Mapping[str, str]) -> bytes:
    return hashlib.sha256(msgspec.json.encode(sorted(headers.items()))).digest()
