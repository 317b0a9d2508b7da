"""Tools of the API that servers run: which of them a request asks for, and what may be repeated of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.pipeline.protocol.params import tools as given
from penstock.pipeline.protocol.params.mcp import McpTool
from penstock.pipeline.protocol.tools import HostedKind

_NOWHERE = frozenset({"file_search", "image_generation", "tool_search", "programmatic_tool_calling"})
"""Tools that only OpenAI runs; beside them computer in all its versions."""

LABELS: Mapping[str, HostedKind] = {
    "python": "python",
    "code_interpreter": "python",
    "browser": "browser",
    "web_search": "browser",
    "web_search_preview": "browser",
    "container": "container",
    "shell": "container",
}
"""The built-in tools by the labels that switch them on, where an ``mcp`` tool has one and says no more."""


def built_in(tool: given.Tool) -> HostedKind | None:
    """The built-in tool that is asked for."""
    match tool:
        case McpTool(server_url=None, connector_id=None):
            return LABELS.get(tool.server_label)
        case given.ShellTool(runs_here=False):
            return None
        case given.OtherTool() if tool.given.get("external_web_access") is False:
            return None  # there is no store of pages here, only the web itself
        case _:
            return _KINDS.get(_family(tool.type))


def is_hosted(kind: str) -> bool:
    """Whether tools of this type are left out rather than refused where nobody runs them: clients send them unasked."""
    return kind in _NOWHERE or kind.startswith("computer") or _family(kind) in ("web_search", "code_interpreter")


def kinds_of(kind: str) -> tuple[str, ...]:
    """What a choice of a tool of this type may mean: built-in tools, or forms of the client's."""
    hosted = _KINDS.get(_family(kind))
    return (kind,) if hosted is None else (hosted, kind)


def told(tool: given.Tool) -> dict[str, Any]:
    """What may be written down of a tool: what the client wrote, without what may be secret."""
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
    """What may be written down of a choice, which some clients make by repeating the whole tool."""
    if isinstance(tools := choice.get("tools"), list):
        return choice | {"tools": [told_choice(tool) for tool in tools]}
    if choice["type"] in ("function", "custom", "namespace"):
        return choice
    return {key: value for key, value in choice.items() if key in ("type", "server_label", "name")}


_KINDS: Mapping[str, HostedKind] = {"code_interpreter": "python", "web_search": "browser", "shell": "container"}


def _family(kind: str) -> str:
    """The type of a tool without its version."""
    return "web_search" if kind.startswith("web_search") else kind


def _without_network(said: dict[str, Any], place: str) -> dict[str, Any]:
    """Its sandbox has no network, and what it was to get there may hold secrets."""
    if not isinstance(box := said.get(place), dict):
        return said
    return said | {place: {key: value for key, value in box.items() if key != "network_policy"}}
