"""An MCP server of the operator's in the place of a built-in tool.

Every response gets a connection of its own, and over HTTP tells its id: what these tools remember, variables or pages,
is for nobody else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.pipeline.frames import Conversation
from penstock.pipeline.protocol.tools import HostedKind
from penstock.stages.services.mcp.failure import Failure
from penstock.stages.services.mcp.servers import McpServers
from penstock.stages.services.mcp.session import McpSession, arguments
from penstock.stages.services.tools import Outcome, Session, bounded

LONGEST = 64_000
"""Characters of a result that an item shows, as many as of the tools that are built in."""

SESSION_HEADER = "x-session-id"
"""How servers of tools for gpt-oss tell one conversation from another."""


class McpHost:
    """A `Host` that runs the calls of a built-in tool on the server that has its name for a label."""

    def __init__(self, servers: McpServers, kind: HostedKind) -> None:
        self._servers = servers
        self._kind: HostedKind = kind

    def session(self, conversation: Conversation) -> Session:
        """A session for one response."""
        inner = self._servers.private_session(self._kind, {SESSION_HEADER: conversation.response.id})
        return _SESSIONS[self._kind](inner)

    async def close(self) -> None:
        """The servers close their connections themselves."""


class _HostedSession:
    def __init__(self, inner: McpSession) -> None:
        self._inner = inner

    def action(self, name: str, text: str) -> dict[str, Any] | None:
        """The text says all of it."""
        return None

    async def run(self, name: str, text: str, seconds: float) -> Outcome:
        """Run a call, and show of it what the tool's items show."""
        try:
            outcome = await self._inner.call(name, self._arguments(text), seconds)
        except Failure as failure:
            outcome = failure.outcome
        outcome = replace(outcome, result=bounded(outcome.result, LONGEST))
        return replace(outcome, data=self._shown(outcome))

    async def close(self) -> None:
        """End the connection."""
        await self._inner.close()

    def _arguments(self, text: str) -> dict[str, Any]:
        return arguments(text)

    def _shown(self, outcome: Outcome) -> tuple[dict[str, Any], ...]:
        return ()


class _Python(_HostedSession):
    def _arguments(self, text: str) -> dict[str, Any]:
        return {"code": text}

    def _shown(self, outcome: Outcome) -> tuple[dict[str, Any], ...]:
        logs = outcome.error or outcome.result
        return ({"type": "logs", "logs": logs},) if logs else ()


class _Browser(_HostedSession):
    def action(self, name: str, text: str) -> dict[str, Any] | None:
        """As far as the arguments tell it: where a number leads, only the server knows."""
        try:
            said = arguments(text)
        except Failure:
            said = {}
        match name:
            case "search":
                return {"type": "search", "query": str(said.get("query", ""))}
            case "find":
                return {"type": "find_in_page", "pattern": str(said.get("pattern", "")), "url": ""}
            case _:
                page = said.get("id")
                return {"type": "open_page", "url": page if isinstance(page, str) else None}


class _Container(_HostedSession):
    def _shown(self, outcome: Outcome) -> tuple[dict[str, Any], ...]:
        exit_code = 0 if outcome.error is None else 1
        ended = {"type": "exit", "exit_code": exit_code}
        return ({"stdout": outcome.result, "stderr": outcome.error or "", "outcome": ended},)


_SESSIONS: dict[HostedKind, type[_HostedSession]] = {"python": _Python, "browser": _Browser, "container": _Container}
