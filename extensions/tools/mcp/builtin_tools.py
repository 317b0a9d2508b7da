"""Use an operator's MCP server in place of a built-in tool.

Each response has its own connection, and over HTTP sends its id.  These tools keep state, such as variables or pages,
which responses must not share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import msgspec

from penstock.extensions.tools.mcp.failures import McpFailure
from penstock.extensions.tools.mcp.mcp_servers import McpServers, McpSession, arguments
from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.hosted_kinds import ByMcp, HostedKind, kinds, takes_text
from penstock.pipeline.protocol.tools import HostedTool, McpServer
from penstock.pipeline.secret import Secret
from penstock.services.mcp_config import read_servers
from penstock.services.tools import Declaration, HostSettings, ServerUnavailable, Session, ToolResult, bounded
from penstock.stages.models.chat.names import CODE_ARGUMENT

if find_spec("mcp") is None:  # without it the host is left out; its import takes long, and waits for the first call
    raise ModuleNotFoundError("No module named 'mcp'", name="mcp")

LONGEST = 64_000
"""Maximum characters of a result, the same as for the built-in tools."""

_RETRY = 30.0
"""Seconds after a failure before a server is listed again."""

SESSION_HEADER = "x-session-id"
"""HTTP header that identifies a session to gpt-oss tool servers."""


class McpHost:
    """A `Host` that runs a built-in tool on the operator's MCP server labelled with the tool's name."""

    def __init__(self, servers: McpServers, kind: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._servers = servers
        self._kind = kind
        self._clock = clock
        self._retry_at = -math.inf

    def session(self, request: ResolvedRequest) -> Session:
        inner = self._servers.private_session(self._server(request), {SESSION_HEADER: request.facts.response_id})
        return _HostedSession(kinds()[self._kind], inner)

    async def declaration(self, request: ResolvedRequest, seconds: float) -> Declaration:
        """Return the functions and the description that the server lists for this request.

        After a failure the server is not listed again for `_RETRY` seconds, as each response would wait for it.
        """
        server = self._server(request)
        is_shared = not server.headers.reveal()
        if is_shared and self._clock() < self._retry_at:
            raise ServerUnavailable("It could not be listed a moment ago.")
        try:
            listing = await self._servers.listing(server, seconds)
        except ServerUnavailable:
            if is_shared:  # headers of a client may be the reason otherwise
                self._retry_at = self._clock() + _RETRY
            raise
        tools = (
            HostedTool(self._kind, tool.name, tool.description or None, tool.input_schema) for tool in listing.tools
        )
        prompted = (tool for tool in tools if tool.name not in listing.unprompted or takes_text(tool))
        return Declaration(tuple(prompted), listing.instructions)

    def _server(self, request: ResolvedRequest) -> McpServer:
        """Return the server, with the headers of the request but for a session of the client's choice."""
        server = request.facts.tools.enabled(self._kind)
        headers = server.headers.reveal().items()
        own = Secret({name: value for name, value in headers if name.lower() != SESSION_HEADER})
        return msgspec.structs.replace(server, headers=own)

    async def close(self) -> None:
        """Do nothing: `McpServers` closes the connections."""


class OperatorServers(McpServers):
    """MCP servers, some of which run a built-in tool."""

    def host(self, kind: str) -> McpHost | None:
        return McpHost(self, kind) if kind in self.labels and kinds()[kind].by_mcp else None


def servers(settings: HostSettings) -> OperatorServers:
    """Return the MCP servers of the operator, and those that requests name."""
    return OperatorServers(read_servers(settings.mcp_config) if settings.mcp_config else {}, settings.allowed)


class _HostedSession:
    def __init__(self, kind: HostedKind, inner: McpSession) -> None:
        self._kind = kind
        self._form = kind.by_mcp or ByMcp()
        self._inner = inner

    def action(self, name: str, text: str) -> dict[str, Any] | None:
        """Return the action of a call, as far as its arguments reveal it."""
        try:
            return self._form.action(name, arguments(text))
        except McpFailure:
            return self._form.action(name, {})

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        """Run a call; ``data`` of the outcome has the form of the built-in tool's items.

        Calls of further functions of the server are ``mcp_call`` items.
        """
        function = self._kind.function(name)
        try:
            is_text = function is not None and function.parameters is None
            outcome = await self._inner.call(name, {CODE_ARGUMENT: text} if is_text else arguments(text), seconds)
        except McpFailure as failure:
            outcome = failure.outcome
        outcome = replace(outcome, result=bounded(outcome.result, LONGEST))
        return replace(outcome, data=self._form.data(outcome.result, outcome.error)) if function else outcome

    async def close(self) -> None:
        await self._inner.close()
