"""A server as one reaches it, whether it is connected at the moment or not.

A connection is opened at the first need and again when it was lost, at most so often.  A call that was under way when
its connection broke may have done its work, so it is made again only where that does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
from mcp import Client, MCPError
from mcp_types import HEADER_MISMATCH, INVALID_REQUEST, CallToolRequest, CallToolRequestParams, CallToolResult, Tool
from msgspec import UNSET

from penstock.pipeline.protocol.items import ListedTool
from penstock.stages.services.mcp import answer
from penstock.stages.services.mcp.config import ServerConfig
from penstock.stages.services.mcp.connection import Connection
from penstock.stages.services.mcp.diagnosis import diagnosed
from penstock.stages.services.mcp.failure import CONNECTION_CLOSED, Failure, protocol_failure
from penstock.stages.services.mcp.hidden import hidden
from penstock.stages.services.mcp.listings import Tools
from penstock.stages.services.mcp.opening import Opening, statuses_noted
from penstock.stages.services.tools import Outcome
from penstock.stages.services.web.ssrf import AllowedNetworks

MOST_TOOLS = 2000
LARGEST_LISTING = 2 * 2**20
"""Bytes of all names, descriptions and schemas together; what is longer no model could read."""
_MOST_PAGES = 500

_FIRST_DELAY = 0.2
_LONGEST_DELAY = 5.0
"""Seconds between two attempts to connect to a server that is down."""

_CLOSING = 1.0
"""Seconds that whoever closes a link waits for it; what takes longer goes on without them."""

Result = TypeVar("Result")
Work: TypeAlias = Callable[[Client], Awaitable[Result]]


class Link:
    """A way to one server; ``connections`` holds those that it has."""

    def __init__(
        self,
        config: ServerConfig,
        allowed: AllowedNetworks | None,
        tools_changed: Callable[[], None],
        connections: set[Connection],
    ) -> None:
        self._secrets = hidden(config)
        self._opening = Opening(config, allowed, tools_changed, self._secrets)
        self._connections = connections
        self._connection: Connection | None = None
        self._is_closed = False
        self._tried = 0.0
        self._delay = _FIRST_DELAY

    async def tools(self, seconds: float) -> Tools:
        """All tools that the server offers; raises `Failure`."""
        return await self._asked(_listed, seconds, is_repeatable=True)

    async def call(self, name: str, arguments: dict[str, Any], seconds: float, *, is_repeatable: bool) -> Outcome:
        """Call a tool; a connection that breaks meanwhile is tried again only where the call ``is_repeatable``."""
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments))
        try:
            result = await self._asked(partial(_called, request), seconds, is_repeatable)
        except Failure as failure:
            return failure.outcome
        return answer.outcome(result, self._secrets)

    async def close(self) -> None:
        """Connect no more, and end the connection there is."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.end()
            await self._connection.closed(_CLOSING)

    async def _asked(self, work: Work[Result], seconds: float, is_repeatable: bool) -> Result:
        with statuses_noted() as statuses:
            try:
                async with asyncio.timeout(seconds):
                    return await self._worked(work, statuses, is_repeatable)
            except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - whatever it is, it is told
                raise diagnosed(error, statuses, seconds, self._secrets) from None

    async def _worked(self, work: Work[Result], statuses: list[int], is_repeatable: bool) -> Result:
        connection = self._connected()
        try:
            return await work(await connection.client())
        except MCPError as error:
            if error.code == INVALID_REQUEST and 404 in statuses:
                connection.end()  # the server has begun anew, and did nothing; another call may have noticed before
            elif not is_repeatable or error.code != CONNECTION_CLOSED:
                raise
        statuses.clear()
        return await work(await self._connected().client())

    def _connected(self) -> Connection:
        """The connection that calls take now, which may still be opening."""
        if self._connection is None or self._connection.is_over:
            self._connection = self._next(self._connection)
        return self._connection

    def _next(self, last: Connection | None) -> Connection:
        """A new connection in place of the ``last``, unless it is too early for that."""
        if self._is_closed:
            raise protocol_failure(CONNECTION_CLOSED, "The connection to the server is closed.")
        now = asyncio.get_running_loop().time()
        if last is None or not last.has_failed:
            self._delay = _FIRST_DELAY
        elif now < self._tried + self._delay:
            raise last.failure
        else:
            self._delay = min(2 * self._delay, _LONGEST_DELAY)
        self._tried = now
        return Connection(self._opening, self._connections)


async def _called(request: CallToolRequest, client: Client) -> CallToolResult:
    """Call past the client's own method, which lets patterns of the server's schema run over the server's result."""
    try:
        return await client.session.send_request(request, CallToolResult)
    except MCPError as error:
        if error.code != HEADER_MISMATCH:
            raise
    await _listed(client)  # from which the SDK learns what arguments go into headers
    return await client.session.send_request(request, CallToolResult)


async def _listed(client: Client) -> Tools:
    tools: list[ListedTool] = []
    size, cursor = 0, None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += map(_listed_tool, page.tools)
        size += len(msgspec.json.encode(tools[len(tools) - len(page.tools) :]))
        if len(tools) > MOST_TOOLS or size > LARGEST_LISTING:
            break
        if (cursor := page.next_cursor) is None:
            return tuple(tools)
    raise protocol_failure(CONNECTION_CLOSED, "The server offers more tools than can be held.")


def _listed_tool(tool: Tool) -> ListedTool:
    hints = tool.annotations.model_dump(by_alias=True, mode="json", exclude_none=True) if tool.annotations else None
    return ListedTool(tool.name, tool.input_schema, tool.description or UNSET, hints or UNSET)
