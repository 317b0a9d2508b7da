"""Input items of calls with item types of their own: convert them from the request body into conversation items."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.params import items as params
from penstock.pipeline.protocol.params.common import Body


def client_item(item: params.ClientCallItem, suffix: str) -> wire.FormCall | wire.FormCallOutput:
    """Return a call that the client runs, or its output; an item without an id gets one that ends in ``suffix``."""
    match item:
        case params.LocalShellCallItem():
            item_id = item.id if item.id != item.call_id else None  # call_id becomes the id of the output item
            action = {"type": "exec", "env": {}} | _fields(item.action)
            return wire.LocalShellCall(item_id or f"lsh_{suffix}", item.call_id, action, _status(item))
        case params.LocalShellCallOutputItem():
            return wire.LocalShellCallOutput(item.call_id, item.output, _status(item))
        case params.ShellCallItem():
            item_id, environment = (
                item.id or f"sh_{suffix}",
                None if item.environment is None else _fields(item.environment),
            )
            return wire.ShellCall(item_id, item.call_id, _fields(item.action), _status(item), environment)
        case params.ShellCallOutputItem():
            item_id, output = item.id or f"sho_{suffix}", tuple(map(_shell_output, item.output))
            return wire.ShellCallOutput(item_id, item.call_id, output, _status(item), item.max_output_length)
        case params.ApplyPatchCallItem():
            return wire.ApplyPatchCall(item.id or f"apc_{suffix}", item.call_id, _fields(item.operation), _status(item))
        case params.ApplyPatchCallOutputItem():
            item_id = item.id or f"apco_{suffix}"
            return wire.ApplyPatchCallOutput(
                item_id, item.call_id, "failed" if item.status == "failed" else "completed", item.output
            )


def server_item(item: params.ServerCallItem, suffix: str) -> wire.Item:
    """Return an item of a server-side tool, or of an approval; without an id it gets one that ends in ``suffix``."""
    match item:
        case params.McpListToolsItem():
            tools = tuple(map(_listed_tool, item.tools or ()))
            error = item.error if isinstance(item.error, str | None) else msgspec.json.encode(item.error).decode()
            return wire.McpListTools(item.id or f"mcpl_{suffix}", item.server_label, tools, error or UNSET)
        case params.McpCallItem():
            return _mcp_call(item, suffix)
        case params.McpApprovalRequestItem():
            return wire.McpApprovalRequest(item.id or f"mcpr_{suffix}", item.server_label, item.name, item.arguments)
        case params.McpApprovalResponseItem():
            item_id, request_id = item.id or f"mcpa_{suffix}", item.approval_request_id
            return wire.McpApprovalResponse(item_id, request_id, item.approve, item.reason)
        case params.CodeInterpreterCallItem():
            outputs = None if item.outputs is None else tuple(map(_code_output, item.outputs))
            code, container = item.code or "", item.container_id or ""
            return wire.CodeInterpreterCall(item.id or f"ci_{suffix}", code, container, _call_status(item), outputs)
        case params.WebSearchCallItem(action=action):
            sent = {} if action is None else action.sent
            known = {key: value for key, value in sent.items() if value is not None}
            return wire.WebSearchCall(item.id or f"ws_{suffix}", {"type": "search"} | known, _call_status(item))


def _mcp_call(item: params.McpCallItem, suffix: str) -> wire.McpCall:
    error = item.error or None
    if isinstance(error, str):
        error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": error}]}
    return wire.McpCall(
        item.id or f"mcp_{suffix}",
        item.server_label,
        item.name,
        item.arguments,
        "failed" if error is not None and item.status is None else _call_status(item),
        item.output,
        error,
        item.approval_request_id,
    )


def _fields(value: Body) -> dict[str, Any]:
    """Return the known fields that the client sent, without nulls."""
    return value.model_dump(exclude_none=True)


def _status(item: params.ClientCallItem) -> wire.ItemStatus:
    """Return the status for item types that have no ``failed``: a failed call is completed."""
    status = _call_status(item)
    return "completed" if status == "failed" else status


def _call_status(item: params.ClientCallItem | params.ServerCallItem) -> wire.CallStatus:
    match item.status:
        case None:
            return "completed"
        case "searching" | "interpreting" | "calling":
            return "in_progress"
        case status:
            return status


def _shell_output(part: params.ShellOutput) -> dict[str, Any]:
    exit_code = {} if part.outcome.type == "timeout" else {"exit_code": part.outcome.exit_code or 0}
    outcome = {"type": part.outcome.type} | exit_code
    return {"stdout": part.stdout or "", "stderr": part.stderr or "", "outcome": outcome}


def _listed_tool(tool: params.ListedToolPart) -> wire.ListedTool:
    return wire.ListedTool(tool.name, tool.input_schema or {}, tool.description or UNSET, tool.annotations or UNSET)


def _code_output(output: params.CodeOutput) -> dict[str, Any]:
    if output.type == "logs":
        return {"type": "logs", "logs": output.logs or ""}
    return {"type": "image", "url": output.url or ""}
