"""Input items of calls with item types of their own: convert them from the request body into conversation items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.pipeline.protocol.items import (
    ApplyPatchCall,
    ApplyPatchCallOutput,
    CallStatus,
    CodeInterpreterCall,
    FormCall,
    FormCallOutput,
    Item,
    ItemStatus,
    ListedTool,
    LocalShellCall,
    LocalShellCallOutput,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    McpListTools,
    ShellCall,
    ShellCallOutput,
    WebSearchCall,
)
from penstock.pipeline.protocol.params import calls as given
from penstock.pipeline.protocol.params.json_body import Pace


async def client_item(item: given.ClientCallItem, suffix: str, pace: Pace) -> FormCall | FormCallOutput:
    """Return a call that the client runs, or its output; an item without an id gets one that ends in ``suffix``."""
    match item:
        case given.LocalShellCallItem():
            item_id = item.id if item.id != item.call_id else None  # call_id becomes the id of the output item
            action = {"type": "exec", "env": {}} | _fields(item.action)
            return LocalShellCall(item_id or f"lsh_{suffix}", item.call_id, action, _status(item))
        case given.LocalShellCallOutputItem():
            return LocalShellCallOutput(item.call_id, item.output, _status(item))
        case given.ShellCallItem():
            environment = None if item.environment is None else _fields(item.environment)
            return ShellCall(item.id or f"sh_{suffix}", item.call_id, _fields(item.action), _status(item), environment)
        case given.ShellCallOutputItem():
            output = await _shell_output(item.output, pace)
            item_id = item.id or f"sho_{suffix}"
            return ShellCallOutput(item_id, item.call_id, output, _status(item), item.max_output_length)
        case given.ApplyPatchCallItem():
            return ApplyPatchCall(item.id or f"apc_{suffix}", item.call_id, _fields(item.operation), _status(item))
        case given.ApplyPatchCallOutputItem():
            item_id = item.id or f"apco_{suffix}"
            return ApplyPatchCallOutput(
                item_id, item.call_id, "failed" if item.status == "failed" else "completed", item.output
            )


async def server_item(item: given.ServerCallItem, suffix: str, pace: Pace) -> Item:
    """Return an item of a server-side tool, or of an approval; without an id it gets one that ends in ``suffix``."""
    match item:
        case given.McpListToolsItem():
            tools = await _listed(item.tools or (), pace)
            error = item.error if isinstance(item.error, str | None) else msgspec.json.encode(item.error).decode()
            return McpListTools(item.id or f"mcpl_{suffix}", item.server_label, tools, error or UNSET)
        case given.McpCallItem():
            return _mcp_call(item, suffix)
        case given.McpApprovalRequestItem():
            return McpApprovalRequest(item.id or f"mcpr_{suffix}", item.server_label, item.name, item.arguments)
        case given.McpApprovalResponseItem():
            request_id, reason = item.approval_request_id, item.reason
            return McpApprovalResponse(item.id or f"mcpa_{suffix}", request_id, item.approve, reason)
        case given.CodeInterpreterCallItem():
            outputs = None if item.outputs is None else await _code_outputs(item.outputs, pace)
            code, container = item.code or "", item.container_id or ""
            return CodeInterpreterCall(item.id or f"ci_{suffix}", code, container, _call_status(item), outputs)
        case given.WebSearchCallItem():
            return WebSearchCall(item.id or f"ws_{suffix}", _web_action(item.action), _call_status(item))


def _mcp_call(item: given.McpCallItem, suffix: str) -> McpCall:
    error = item.error or None
    if isinstance(error, str):
        error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": error}]}
    return McpCall(
        item.id or f"mcp_{suffix}",
        item.server_label,
        item.name,
        item.arguments,
        "failed" if error is not None and item.status is None else _call_status(item),
        item.output,
        error,
        item.approval_request_id,
    )


def _fields(value: Any) -> dict[str, Any]:
    """Return the known fields that the client sent, without nulls."""
    fields: dict[str, Any] = value.model_dump(exclude_none=True)
    return fields


def _status(item: given.ClientCallItem) -> ItemStatus:
    """Return the status for item types that have no ``failed``: a failed call is completed."""
    status = _call_status(item)
    return "completed" if status == "failed" else status


def _call_status(item: given.ClientCallItem | given.ServerCallItem) -> CallStatus:
    match item.status:
        case None:
            return "completed"
        case "searching" | "interpreting" | "calling":
            return "in_progress"
        case status:
            return status


async def _shell_output(outputs: Sequence[given.ShellOutput], pace: Pace) -> tuple[dict[str, Any], ...]:
    output = []
    for part in outputs:
        await pace()
        output.append({"stdout": part.stdout or "", "stderr": part.stderr or "", "outcome": _outcome(part.outcome)})
    return tuple(output)


def _outcome(outcome: given.ShellOutcome) -> dict[str, Any]:
    return {"type": "timeout"} if outcome.type == "timeout" else {"type": "exit", "exit_code": outcome.exit_code or 0}


async def _listed(listed_tools: Sequence[given.ListedToolPart], pace: Pace) -> tuple[ListedTool, ...]:
    tools = []
    for tool in listed_tools:
        await pace()
        tools.append(
            ListedTool(tool.name, tool.input_schema or {}, tool.description or UNSET, tool.annotations or UNSET)
        )
    return tuple(tools)


async def _code_outputs(code_outputs: Sequence[given.CodeOutput], pace: Pace) -> tuple[dict[str, Any], ...]:
    outputs = []
    for output in code_outputs:
        await pace()
        is_logs = output.type == "logs"
        outputs.append(
            {"type": "logs", "logs": output.logs or ""} if is_logs else {"type": "image", "url": output.url or ""}
        )
    return tuple(outputs)


def _web_action(action: given.WebAction | None) -> dict[str, Any]:
    fields = {} if action is None else {key: value for key, value in action.given.items() if value is not None}
    return {"type": "search"} | fields
