"""One response's use of an MCP server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.stages.services.mcp.failure import CONNECTION_CLOSED, INVALID_PARAMS, McpFailure, protocol_failure
from penstock.stages.services.tools import Outcome

if TYPE_CHECKING:
    from penstock.stages.services.mcp.link import Link


def _never(name: str) -> bool:
    """Return False for every tool: by default, no call is repeated."""
    return name == ""


class McpSession:
    """A `Session` over a link opened by ``open_link`` at the first call, and closed with the session unless shared.

    ``is_repeatable`` returns True for the name of a tool if calling it twice is harmless.
    """

    def __init__(
        self,
        open_link: Callable[[], Awaitable[Link]],
        is_repeatable: Callable[[str], bool] = _never,
        *,
        is_shared: bool = False,
    ) -> None:
        self._open_link = open_link
        self._is_repeatable = is_repeatable
        self._is_shared = is_shared
        self._link: Link | None = None
        self._is_closed = False

    def action(self, name: str, text: str) -> dict[str, Any] | None:
        """Return None: the item shows the arguments themselves, and needs no other form."""
        return None

    async def run(self, name: str, text: str, seconds: float) -> Outcome:
        """Call a tool with the JSON arguments that the model wrote."""
        try:
            return await self.call(name, arguments(text), seconds)
        except McpFailure as failure:
            return failure.outcome

    async def call(self, name: str, call_arguments: dict[str, Any], seconds: float) -> Outcome:
        """Call a tool; raise `McpFailure` if there is no such server or the session is closed."""
        link = self._link or await self._open_link()
        if self._is_closed:
            raise protocol_failure(CONNECTION_CLOSED, "The response has ended.")
        self._link = self._link or link  # concurrent first calls may each open a link; the others never connect
        return await self._link.call(name, call_arguments, seconds, is_repeatable=self._is_repeatable(name))

    async def close(self) -> None:
        """Close the connection unless it is shared."""
        self._is_closed = True
        if self._link is not None and not self._is_shared:
            await self._link.close()


def arguments(text: str) -> dict[str, Any]:
    """Decode the arguments that the model wrote; raise `McpFailure` if they are not a JSON object."""
    try:
        decoded = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise protocol_failure(INVALID_PARAMS, f"The arguments are no valid JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise protocol_failure(INVALID_PARAMS, "The arguments are no JSON object.")
    return decoded
