"""API tools that servers run: recognise them in a request, and remove secrets before a tool is stored or echoed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.pipeline.protocol.params import tools as given
from penstock.pipeline.protocol.params.mcp import McpTool
from penstock.pipeline.protocol.tools import HostedKind

_NOWHERE = frozenset({"file_search", "image_generation", "tool_search", "programmatic_tool_calling"})
"""Tools that only OpenAI runs; all versions of ``computer`` belong here too."""

LABELS: Mapping[str, HostedKind] = {
    "python": "python",
    "code_interpreter": "python",
    "browser": "browser",
    "web_search": "browser",
    "web_search_preview": "browser",
    "container": "container",
    "shell": "container",
}
"""The built-in tools by the labels that enable them, for an ``mcp`` tool with a label but no URL or connector."""


def built_in(tool: given.Tool) -> HostedKind | None:
    """Return the built-in tool that a tool of the request means, or None."""
    match tool:
        case McpTool(server_url=None, connector_id=None):
            return LABELS.get(tool.server_label)
        case given.ShellTool(runs_here=False):
            return None
        case given.OtherTool() if tool.given.get("external_web_access") is False:
            return None  # OpenAI would search its page cache; this server has only the live web
        case _:
            return _KINDS.get(_family(tool.type))


def is_hosted(kind: str) -> bool:
    """Return True if tools of this type are ignored, not refused, on a server that cannot run them.

    Clients send them by default, without needing them.
    """
    return kind in _NOWHERE or kind.startswith("computer") or _family(kind) in ("web_search", "code_interpreter")


def kinds_of(kind: str) -> tuple[str, ...]:
    """Return the kinds of tools that a choice of this type may mean: a built-in tool, or a tool of the client."""
    hosted = _KINDS.get(_family(kind))
    return (kind,) if hosted is None else (hosted, kind)


def told(tool: given.Tool) -> dict[str, Any]:
    """Return a tool as the client wrote it, without possible secrets, to be stored or echoed."""
    match tool:
        case McpTool():
            return tool.told
        case given.CodeInterpreterTool():
            return _without_network(tool.given, "container")
        case given.ShellTool():
            return _without_network(tool.given, "environment")
        case _:
            return tool.given


def told_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a tool choice without possible secrets: some clients repeat the whole tool in it."""
    if isinstance(tools := choice.get("tools"), list):
        return choice | {"tools": [told_choice(tool) for tool in tools]}
    if choice["type"] in ("function", "custom", "namespace"):
        return choice
    return {key: value for key, value in choice.items() if key in ("type", "server_label", "name")}


_KINDS: Mapping[str, HostedKind] = {"code_interpreter": "python", "web_search": "browser", "shell": "container"}


def _family(kind: str) -> str:
    """Return the type of a tool without its version."""
    return "web_search" if kind.startswith("web_search") else kind


def _without_network(tool: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the tool without its network policy: it may hold secrets, and the sandbox has no network anyway."""
    if not isinstance(sandbox := tool.get(place), dict):
        return tool
    return tool | {place: {key: value for key, value in sandbox.items() if key != "network_policy"}}
