"""MCP servers, configured by the operator or named by requests.

The operator's servers have one connection each, shared by all responses.  A server that a request names or sends
headers to gets a connection for each response, so that no client can use another's permissions.

The SDK takes half a second to import, so it is imported on first use, and in a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.pipeline.protocol.params.mcp import FRAMING, is_web_url
from penstock.pipeline.protocol.tools import McpServer
from penstock.stages.services.mcp.config import HttpServer, ServerConfig
from penstock.stages.services.mcp.failure import INVALID_PARAMS, McpFailure, protocol_failure
from penstock.stages.services.mcp.listings import Key, Listings, Tools
from penstock.stages.services.mcp.session import McpSession
from penstock.stages.services.tools import ServerUnavailable
from penstock.stages.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks

if TYPE_CHECKING:
    from penstock.stages.services.mcp.connection import Connection
    from penstock.stages.services.mcp.link import Link

logger = logging.getLogger(__name__)

FRESH = 300.0
"""Seconds for which a listing is cached."""

_NOT_THE_CLIENTS = FRAMING | {"content-type"}
"""Headers about the transfer of a message, which are dropped if a request names them."""


@dataclass(frozen=True)
class Target:
    """A server as named by a request; ``label`` is set if it is one of the operator's.

    ``is_shared`` is True if all responses share a connection, because the request sends it no headers.
    ``allowed`` are the networks permitted besides public addresses; None permits any address.
    """

    config: ServerConfig
    key: Key
    label: str | None = None
    is_shared: bool = False
    allowed: AllowedNetworks | None = None


class McpServers:
    """The `McpHosts` implementation over the official SDK.  Listings are cached for ``fresh`` seconds."""

    def __init__(
        self, servers: Mapping[str, ServerConfig], allowed: AllowedNetworks = NOTHING_ALLOWED, *, fresh: float = FRESH
    ) -> None:
        self._servers = dict(servers)
        self._allowed = allowed
        self._listings = Listings(fresh)
        self._links: dict[str, Link] = {}
        self._connections: set[Connection] = set()

    @property
    def labels(self) -> frozenset[str]:
        """The labels of the operator's servers."""
        return frozenset(self._servers)

    async def tools(self, server: McpServer, seconds: float) -> Tools:
        """Return all tools of a server; raise `ServerUnavailable` if they cannot be listed."""
        try:
            target = self._target(server)
            return await self._listings.get(target.key, partial(self._list, target, seconds))
        except McpFailure as failure:
            logger.info("The MCP server %s offers nothing: %s", server.label, failure)
            raise ServerUnavailable(str(failure)) from None

    def session(self, server: McpServer) -> McpSession:
        """Return a session for one response.  If there is no such server, its calls fail."""
        try:
            target = self._target(server)
        except McpFailure as failure:
            return McpSession(partial(_refused, failure))
        is_repeatable = partial(self._is_repeatable, target.key)
        return McpSession(partial(self._link, target), is_repeatable, is_shared=target.is_shared)

    def private_session(self, label: str, headers: Mapping[str, str]) -> McpSession:
        """Return a session with a connection of its own to an operator's server that keeps state for a response."""
        config = self._servers[label]
        if isinstance(config, HttpServer):
            config = _with_headers(config, headers)
        return McpSession(partial(self._link, Target(config, (label, b""))))

    async def close(self) -> None:
        """Close all connections."""
        await self._listings.close()
        await asyncio.gather(*(link.close() for link in self._links.values()))
        connections = tuple(self._connections)
        for connection in connections:
            connection.end()
        await asyncio.gather(*(connection.closed() for connection in connections))

    def _target(self, server: McpServer) -> Target:
        """Return the server that a request names; raise `McpFailure` if its URL is invalid or its label unknown."""
        headers = {
            name: value for name, value in server.headers.reveal().items() if name.lower() not in _NOT_THE_CLIENTS
        }
        if server.url is not None:
            if not is_web_url(server.url):
                raise protocol_failure(INVALID_PARAMS, "The server's URL is none of http:// or https://.")
            return Target(HttpServer(server.url, headers), (server.url, _digest(headers)), allowed=self._allowed)
        label = server.configured_as
        if (config := self._servers.get(label)) is None:
            raise protocol_failure(INVALID_PARAMS, f"There is no MCP server {label} here.")
        if headers and isinstance(config, HttpServer):
            return Target(_with_headers(config, headers), (label, _digest(headers)), label)
        return Target(config, (label, b""), label, is_shared=True)

    async def _list(self, target: Target, seconds: float) -> Tools:
        link = await self._link(target)
        try:
            return await link.tools(seconds)
        finally:
            if not target.is_shared:
                await link.close()

    async def _link(self, target: Target) -> Link:
        """Return a new link to a server, or the existing one if it is shared."""
        module = await asyncio.to_thread(importlib.import_module, "penstock.stages.services.mcp.link")
        changed = partial(self._listings.forget, target.key)
        link: Link = module.Link(target.config, target.allowed, changed, self._connections)
        return self._links.setdefault(target.label or "", link) if target.is_shared else link

    def _is_repeatable(self, key: Key, name: str) -> bool:
        """Return True if the tool's hints (``readOnlyHint``, ``idempotentHint``) declare a second call harmless."""
        tools = self._listings.known(key) or ()
        hints = next((tool.annotations or {} for tool in tools if tool.name == name), {})
        return hints.get("readOnlyHint") is True or hints.get("idempotentHint") is True


async def _refused(failure: McpFailure) -> Link:
    raise failure


def _with_headers(config: HttpServer, headers: Mapping[str, str]) -> HttpServer:
    """Add ``headers`` to an operator's server; the operator's own headers take precedence."""
    own = {name.lower() for name in config.headers}
    added = {name: value for name, value in headers.items() if name.lower() not in own}
    return replace(config, headers={**added, **config.headers})


def _digest(headers: Mapping[str, str]) -> bytes:
    return hashlib.sha256(msgspec.json.encode(sorted(headers.items()))).digest()
