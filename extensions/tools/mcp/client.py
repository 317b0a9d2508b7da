"""The client of one MCP server, which connects when needed.

A connection is opened by the first call, and again by the next call after it was lost.  If the server is down, calls
fail at once until a growing delay has passed.  A call may have taken effect before its connection broke, so it is
repeated only if that is harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import mcp_types
import msgspec
from mcp import Client, MCPError
from mcp.shared.inbound import x_mcp_header_map
from mcp_types import CallToolResult, ContentBlock, ElicitRequest, EmbeddedResource, InputRequiredResult
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from msgspec import UNSET
from pydantic import TypeAdapter

from penstock.extensions.tools.mcp.connection import McpConnection
from penstock.extensions.tools.mcp.diagnosis import diagnosed
from penstock.extensions.tools.mcp.failures import CONNECTION_CLOSED, McpFailure, protocol_failure, tool_failure
from penstock.extensions.tools.mcp.incoming import MOST_ENTRIES
from penstock.extensions.tools.mcp.listings import Listing, Listings, Target
from penstock.extensions.tools.mcp.transports import statuses_noted
from penstock.pipeline.protocol.items import ListedTool
from penstock.services.mcp_config import SecretMask, mask_secrets
from penstock.services.tools import ToolResult, callable_tools
from penstock.stages.models.images import NoImage, check_data_url

MOST_TOOLS = MOST_ENTRIES["tools"]
LARGEST_LISTING = 2 * 2**20
"""Maximum bytes of a listing as JSON.  A longer one would not fit a model's context."""
_MOST_PAGES = 500
"""Pages of a listing."""

_FIRST_DELAY = 0.2
_LONGEST_DELAY = 5.0
"""Seconds between attempts to connect to a server that is down, doubled from `_FIRST_DELAY` up to this."""

_CLOSING = 1.0
"""Seconds that `McpClient.close` waits.  A connection that takes longer goes on closing in the background."""

Result = TypeVar("Result")
Work: TypeAlias = Callable[[Client], Awaitable[Result]]
CallResult: TypeAlias = CallToolResult | InputRequiredResult

_CALL_RESULT: TypeAdapter[CallResult] = TypeAdapter(CallResult)


class McpClient:
    """The client of one server.  Its connections are in ``connections`` until they are closed."""

    def __init__(self, target: Target, listings: Listings, connections: set[McpConnection]) -> None:
        self._target = target
        self._listings = listings
        self._connections = connections
        self._secrets = mask_secrets(target.config)
        self._connection: McpConnection | None = None
        self._has_listed: Client | None = None
        """The SDK's client that has listed the tools: it knows which arguments to send as headers too."""
        self._is_closed = False
        self._tried = 0.0
        self._delay = _FIRST_DELAY

    async def listing(self, seconds: float) -> Listing:
        return await self._run(self._list, seconds, is_repeatable=True)

    async def call(self, name: str, arguments: dict[str, Any], seconds: float) -> ToolResult:
        """Call a tool.

        If the connection breaks meanwhile, the call is repeated only if the tool's hints declare that harmless.
        """
        listed = self._listings.tool(self._target.key, name)
        request = mcp_types.CallToolRequest(params=mcp_types.CallToolRequestParams(name=name, arguments=arguments))
        may_need_headers = listed is None or bool(x_mcp_header_map(listed.input_schema))
        try:
            result = await self._run(partial(self._call, request, may_need_headers), seconds, _is_repeatable(listed))
        except McpFailure as failure:
            return failure.outcome
        return outcome_of(result, self._secrets)

    async def let_go(self) -> None:
        """Close the client of one response; one that all responses share stays open."""
        if not self._target.is_shared:
            await self.close()

    async def close(self) -> None:
        self._is_closed = True
        if self._connection is not None:
            self._connection.end()
            await self._connection.closed(_CLOSING)

    async def _run(self, work: Work[Result], seconds: float, is_repeatable: bool) -> Result:
        with statuses_noted() as statuses:
            try:
                async with asyncio.timeout(seconds):
                    return await self._run_once_or_twice(work, statuses, is_repeatable)
            except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - reported as a `McpFailure`
                raise diagnosed(error, statuses, seconds, self._secrets) from None

    async def _run_once_or_twice(self, work: Work[Result], statuses: list[int], is_repeatable: bool) -> Result:
        connection = self._current()
        try:
            return await work(await connection.client())
        except MCPError as error:
            if error.code == mcp_types.INVALID_REQUEST and 404 in statuses:
                connection.end()  # the server has lost the session (MCP: status 404), so it ran nothing
            elif not is_repeatable or error.code != CONNECTION_CLOSED:
                raise
        statuses.clear()
        return await work(await self._current().client())

    async def _list(self, client: Client) -> Listing:
        listing = await _listed(client)
        self._has_listed = client
        return listing

    async def _call(self, request: mcp_types.CallToolRequest, may_need_headers: bool, client: Client) -> CallResult:
        """Send the call through the session, as the client's own method would validate the result.

        It would run the regular expressions of an untrusted server's schema on that server's result.
        """
        is_modern = client.protocol_version in MODERN_PROTOCOL_VERSIONS
        if is_modern and may_need_headers and self._has_listed is not client:
            await self._list(client)
        try:
            return await client.session.send_request(request, _CALL_RESULT)
        except MCPError as error:
            if error.code != mcp_types.HEADER_MISMATCH:
                raise
        await self._list(client)  # the schema has changed
        return await client.session.send_request(request, _CALL_RESULT)

    def _current(self) -> McpConnection:
        """Return the current connection, which may still be opening, or open a new one."""
        if self._connection is None or self._connection.is_over:
            self._connection = self._next(self._connection)
        return self._connection

    def _next(self, last: McpConnection | None) -> McpConnection:
        """Return a new connection; raise the ``last`` one's failure if it is too early for another attempt."""
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
        return McpConnection(self._target, self._listings, self._secrets, self._connections)


async def _listed(client: Client) -> Listing:
    tools: list[ListedTool] = []
    unprompted: set[str] = set()
    size, cursor = 0, None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        listed = tuple(map(_listed_tool, page.tools))
        tools += listed
        unprompted |= {tool.name for tool in page.tools if (tool.meta or {}).get("include_in_prompt") is False}
        size += len(msgspec.json.encode(listed))
        if len(tools) > MOST_TOOLS or size > LARGEST_LISTING:
            break
        if (cursor := page.next_cursor) is None:
            return Listing(tuple(callable_tools(tools)), client.instructions or "", frozenset(unprompted))
    raise protocol_failure(CONNECTION_CLOSED, "The server offers more tools than the limit.")


def _listed_tool(tool: mcp_types.Tool) -> ListedTool:
    hints = tool.annotations.model_dump(by_alias=True, mode="json", exclude_none=True) if tool.annotations else None
    return ListedTool(tool.name, tool.input_schema, tool.description or UNSET, hints or UNSET)


def _is_repeatable(listed: ListedTool | None) -> bool:
    hints = (listed.annotations if listed else None) or {}
    return hints.get("readOnlyHint") is True or hints.get("idempotentHint") is True


def outcome_of(result: CallResult, secrets: SecretMask) -> ToolResult:
    """Convert the result of a call to text, with the images that a model may see; ``secrets`` are masked."""
    if isinstance(result, InputRequiredResult):
        return tool_failure(secrets.mask(_wanted(result))).outcome
    text = secrets.mask("\n".join(_texts(result)))
    if result.is_error:
        return tool_failure(text or "The tool failed.").outcome
    return ToolResult(text, images=tuple(filter(None, map(_image, result.content))))


def _wanted(result: InputRequiredResult) -> str:
    """Describe the input that a tool waits for.  The model may ask its user, and call again with other arguments."""
    questions = [
        request.params.message if isinstance(request, ElicitRequest) else request.method
        for request in (result.input_requests or {}).values()
    ]
    text = "The tool asks for more input, which cannot be given to a running call."
    return "\n".join([text, *questions])


def _texts(result: CallToolResult) -> Iterable[str]:
    yield from map(_text, result.content)
    says_it = any(isinstance(block, mcp_types.TextContent) or _is_text(block) for block in result.content)
    if result.structured_content is not None and not says_it:
        yield msgspec.json.encode(result.structured_content).decode()


def _is_text(block: ContentBlock) -> bool:
    return isinstance(block, EmbeddedResource) and isinstance(block.resource, mcp_types.TextResourceContents)


def _image(block: ContentBlock) -> str | None:
    """Return the image of a block as a data URL; None if it has none, or none that a model could be shown."""
    match block:
        case mcp_types.ImageContent(data=data, mime_type=kind):
            url = f"data:{kind};base64,{data}"
        case EmbeddedResource(resource=mcp_types.BlobResourceContents(blob=data, mime_type=str(kind))):
            url = f"data:{kind};base64,{data}"
        case _:
            return None
    try:
        check_data_url(url)
    except NoImage:
        return None
    return url


def _text(block: ContentBlock) -> str:
    match block:
        case mcp_types.TextContent():
            return block.text
        case mcp_types.ImageContent():
            return f"[image: {block.mime_type}]"
        case mcp_types.AudioContent():
            return f"[audio: {block.mime_type}]"
        case mcp_types.ResourceLink():
            return f"[resource: {block.name}, {block.uri}]"
        case EmbeddedResource(resource=mcp_types.TextResourceContents() as resource):
            return f"[resource: {resource.uri}]\n{resource.text}"
        case EmbeddedResource():
            return f"[resource: {block.resource.uri}, {block.resource.mime_type or 'binary'}]"
