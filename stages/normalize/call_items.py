"""Input items of calls with item types of their own: convert them from the request body into conversation items."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET

from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.params import items as params
from penstock.pipeline.protocol.params.common import Body


def client_item(item: params.ClientCallItem, item_id: str) -> wire.FormCall | wire.FormCallOutput:
    """Return a call that the client runs, or its output."""
    status = _status(item)
    match item:
        case params.LocalShellCallItem():
            return wire.LocalShellCall(
                item_id, item.call_id, {"type": "exec", "env": {}} | _fields(item.action), status
            )
        case params.LocalShellCallOutputItem():
            return wire.LocalShellCallOutput(item_id, item.output, status)
        case params.ShellCallItem():
            environment = None if item.environment is None else _fields(item.environment)
            return wire.ShellCall(item_id, item.call_id, _fields(item.action), status, environment)
        case params.ShellCallOutputItem():
            output = tuple(map(_shell_output, item.output))
            return wire.ShellCallOutput(item_id, item.call_id, output, status, item.max_output_length)
        case params.ApplyPatchCallItem():
            return wire.ApplyPatchCall(item_id, item.call_id, _fields(item.operation), status)
        case params.ApplyPatchCallOutputItem():
            outcome: Literal["completed", "failed"] = "failed" if item.status == "failed" else "completed"
            return wire.ApplyPatchCallOutput(item_id, item.call_id, outcome, item.output)


def server_item(item: params.ServerCallItem, item_id: str) -> wire.Item:
    """Return an item of a server-side tool, or of an approval."""
    match item:
        case params.McpListToolsItem():
            tools = tuple(map(_listed_tool, item.tools or ()))
            error = item.error if isinstance(item.error, str | None) else msgspec.json.encode(item.error).decode()
            return wire.McpListTools(item_id, item.server_label, tools, error or UNSET)
        case params.McpCallItem():
            return _mcp_call(item, item_id)
        case params.McpApprovalRequestItem():
            return wire.McpApprovalRequest(item_id, item.server_label, item.name, item.arguments)
        case params.McpApprovalResponseItem():
            return wire.McpApprovalResponse(item_id, item.approval_request_id, item.approve, item.reason)
        case params.CodeInterpreterCallItem():
            outputs = None if item.outputs is None else tuple(map(_code_output, item.outputs))
            code, container = item.code or "", item.container_id or ""
            return wire.CodeInterpreterCall(item_id, code, container, _call_status(item), outputs)
        case params.WebSearchCallItem(action=action):
            sent = {} if action is None else action.sent
            known = {key: value for key, value in sent.items() if value is not None}
            return wire.WebSearchCall(item_id, _call_status(item), {"type": "search"} | known)


def _mcp_call(item: params.McpCallItem, item_id: str) -> wire.McpCall:
    error = item.error or None
    if isinstance(error, str):
        error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": error}]}
    status = "failed" if error is not None and item.status is None else _call_status(item)
    called = (item.server_label, item.name, item.arguments)
    return wire.McpCall(item_id, *called, status, item.output, error, item.approval_request_id)


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
