"""The headers by which coding agents name their session, on each of its requests."""

from __future__ import annotations

from collections.abc import Mapping

AGENTS: Mapping[str, str] = {
    "X-Claude-Code-Session-Id": "Claude Code, with its subagents",
    "session-id": "Codex, with its subagents, and pi",
    "session_id": "earlier releases of Codex",
    "x-session-affinity": "pi, for some providers",
    "x-opencode-session": "opencode, for its own provider; it sends others X-Session-ID",
}
"""The agents that send a header, by the header; the first that a request has counts."""


def session_of_agent(headers: Mapping[str, str]) -> str:
    """Return the id of its session that an agent sends; empty if it sends none."""
    return next((given for name in AGENTS if (given := headers.get(name))), "")
