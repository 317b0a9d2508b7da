"""MCP servers: from what clients write to what the ``converse`` stage asks."""

from __future__ import annotations

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.mcp import McpTool
from penstock.pipeline.protocol.params.mcp import ToolFilter as GivenFilter
from penstock.pipeline.protocol.tools import McpServer, ToolFilter
from penstock.pipeline.secret import Secret


def server(tool: McpTool, path: str, labels: frozenset[str] | None) -> McpServer:
    """The server of a tool at ``path``; the operator's are known by ``labels``, or nobody knows which there are.

    Raises `InvalidRequest` for one without a URL that the operator does not know either.
    """
    if tool.server_url is None and labels is not None:
        key = "server_label" if tool.connector_id is None else "connector_id"
        label: str = getattr(tool, key)
        if label not in labels:
            message = f"This server knows no MCP server {shortened(label)!r}: give its server_url."
            raise InvalidRequest(message, param=f"{path}.{key}")
    always, never, approves_rest = _approval(tool)
    return McpServer(
        tool.server_label,
        tool.server_url,
        Secret(tool.sent_headers),
        tool.server_description,
        _allowed(tool),
        always,
        never,
        approves_rest,
        tool.connector_id,
    )


def refuse_own(tool: McpTool, path: str) -> None:
    """Raise `InvalidRequest` for a server that is the client's own.

    An item is stored with its conversation, and the way to such a server, its secrets included, must not be.
    """
    for key in ("server_url", "headers", "authorization"):
        if getattr(tool, key) is not None:
            message = "An MCP server of your own belongs in tools: what an item brings is stored with the conversation."
            raise InvalidRequest(message, param=f"{path}.{key}")


def _allowed(tool: McpTool) -> ToolFilter | None:
    if isinstance(tool.allowed_tools, list):
        return ToolFilter(tuple(tool.allowed_tools))
    return _filter(tool.allowed_tools)


def _approval(tool: McpTool) -> tuple[ToolFilter | None, ToolFilter | None, bool]:
    """Whose calls need approval, whose do not, and whether the others' do."""
    said = tool.require_approval
    if said is None or isinstance(said, str):
        return None, None, said != "never"
    return _filter(said.always), _filter(said.never), True


def _filter(said: GivenFilter | None) -> ToolFilter | None:
    """None where it says nothing: it would be one that lets everything through."""
    if said is None or (said.tool_names is None and said.read_only is None):
        return None
    return ToolFilter(None if said.tool_names is None else tuple(said.tool_names), said.read_only)
