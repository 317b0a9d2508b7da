"""MCP servers: convert the ``mcp`` tools of a request into the servers that ``converse`` connects to."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.tools import McpToolParam, ToolFilterParam
from penstock.pipeline.protocol.tools import ANY_NAME, EVERY_TOOL, McpServer, ToolFilter
from penstock.pipeline.secret import Secret
from penstock.stages.normalize.declared import callers_of


def server_of(tool: McpToolParam, path: str, labels: frozenset[str] | None, of_unknown: str) -> McpServer:
    """Return the server of the tool at ``path``; ``labels`` are those of the operator's servers, None if not known yet.

    The error about another label ends with ``of_unknown``.
    Raises `InvalidRequest` for a server that has no URL and is not one of the operator's.
    """
    if tool.server_url is None and labels is not None:
        key = "server_label" if tool.connector_id is None else "connector_id"
        label: str = getattr(tool, key)
        if label not in labels and label in kinds().by_label:
            message = f"This server does not offer the built-in tool {label!r} to this client."
            raise InvalidRequest(message, param=f"{path}.{key}", code="invalid_value")
        if label not in labels:
            message = f"This server knows no MCP server {shortened(label)!r}: {of_unknown}."
            raise InvalidRequest(message, param=f"{path}.{key}", code="invalid_value")
    always, never, approves_rest = _approval(tool)
    return McpServer(
        tool.server_label,
        url=tool.server_url,
        headers=Secret(tool.sent_headers),
        description=tool.server_description,
        allowed=_allowed(tool),
        always=always,
        never=never,
        approves_rest=approves_rest,
        connector=tool.connector_id,
        is_deferred=True if tool.defer_loading else UNSET,
        callers=callers_of(tool),
    )


def settings_of(tool: McpToolParam, kind: str) -> McpServer:
    """Return the settings of a built-in tool that is enabled as an MCP server: its headers and its allowed tools."""
    return McpServer(kind, headers=Secret(tool.sent_headers), allowed=_allowed(tool))


def refuse_own_server(tool: McpToolParam, path: str) -> None:
    """Raise `InvalidRequest` for a server with a URL, headers or authorization of the client's.

    An item is stored with its conversation, but a client's server address and secrets must not be stored.
    """
    for key in ("server_url", "headers", "authorization"):
        if getattr(tool, key) is not None:
            message = f"A server with its own {key} belongs in tools, because items are stored with the conversation."
            raise InvalidRequest(message, param=f"{path}.{key}", code="invalid_value")


def refuse_headers(tool: McpToolParam, path: str) -> None:
    """Raise `UnsupportedParameter` for headers or an authorization, which a host of the operator's own does not get."""
    for key in ("headers", "authorization"):
        if getattr(tool, key):
            message = f"The tool {tool.server_label!r} runs in this server, and takes no {key}."
            raise UnsupportedParameter(message, param=f"{path}.{key}")


def _allowed(tool: McpToolParam) -> ToolFilter | None:
    allowed = tool.allowed_tools
    found = ToolFilter(_names(allowed)) if isinstance(allowed, list) else _filter(allowed)
    return None if found == EVERY_TOOL else found


def _approval(tool: McpToolParam) -> tuple[ToolFilter | None, ToolFilter | None, bool]:
    """Return the filters of tools that always and that never need approval, and True if all other tools need it."""
    policy = tool.require_approval
    if policy is None or isinstance(policy, str):
        return None, None, policy != "never"
    return _filter(policy.always), _filter(policy.never), True


def _filter(tool_filter: ToolFilterParam | None) -> ToolFilter | None:
    """Return the filter, or None if it is empty: an empty filter would match every tool."""
    if tool_filter is None or (tool_filter.tool_names is None and tool_filter.read_only is None):
        return None
    return ToolFilter(_names(tool_filter.tool_names), tool_filter.read_only)


def _names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names; None for all, which `ANY_NAME` among them stands for, as in vLLM."""
    return None if names is None or ANY_NAME in names else tuple(names)
