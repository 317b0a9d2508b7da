from __future__ import annotations

from typing import Any

import pytest

from penstock.api.socket.steers import required_input
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.items import OutputItem

SANDBOX = {"type": "container_reference"}


@pytest.mark.parametrize(
    ("item", "required"),
    [
        (
            items.FunctionCall("fc", "c", "f", "{}", "completed"),
            {"type": "function_call_output", "call_id": "c", "name": "f"},
        ),
        (items.FunctionCall("fc", "c", "f", "{}", "completed", is_async=True), None),
        (items.FunctionCall("fc", "c", "f", "{", "incomplete"), None),
        (items.CustomToolCall("ctc", "c", "f", "x", "completed"), {"type": "custom_tool_call_output", "call_id": "c"}),
        (items.ShellCall("sh", "c", {}, "completed"), {"type": "shell_call_output", "call_id": "c"}),
        (items.ShellCall("sh", "c", {}, "completed", SANDBOX), None),
        (items.ApplyPatchCall("apc", "c", {}, "completed"), {"type": "apply_patch_call_output", "call_id": "c"}),
        (
            items.LocalShellCall("lsh", "c", {}, "completed"),
            {"type": "function_call_output", "call_id": "c", "name": "local_shell"},
        ),
        (
            items.McpApprovalRequest("mcpr", "docs", "f", "{}"),
            {"type": "mcp_approval_response", "approval_request_id": "mcpr"},
        ),
        (items.McpCall("mcp", "docs", "f", "{}", "completed", "x"), None),
        (items.Message("msg", "completed", "assistant", (items.OutputText("x"),)), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_calls_of_the_client_require_its_input(item: OutputItem, required: dict[str, Any] | None) -> None:
    assert [*required_input([item])] == ([] if required is None else [required])
