"""Errors in tools other than functions, and in the items of their calls."""

from __future__ import annotations

import json

import pytest

from tests.support.requests import Json, choice, item, refusal, server

SHELL = {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}
SHELL_OUTPUT = {"type": "shell_call_output", "call_id": "c", "output": []}
MCP_CALL = {"type": "mcp_call", "server_label": "m", "name": "f", "arguments": "{}"}
APPROVAL = {"type": "mcp_approval_response", "approval_request_id": "r", "approve": True}
PATCH = {"type": "apply_patch_call", "call_id": "c"}

CALLS = [
    (item(type="local_shell_call", call_id="c"), "Field required", "input[0].action"),
    (item(type="local_shell_call", call_id="c", action={}), "Field required", "input[0].action.command"),
    (item(type="local_shell_call_output", output=""), "Field required", "input[0].call_id"),
    (item(type="local_shell_call_output", output="", id=5), "valid string", "input[0].id"),
    (item(type="local_shell_call_output", call_id="c", output=[]), "valid string", "input[0].output"),
    (item(**SHELL | {"action": {"commands": "ls"}}), "valid array", "input[0].action.commands"),
    (item(**SHELL | {"action": {"commands": [5]}}), "valid string", "input[0].action.commands[0]"),
    (item(**SHELL | {"action": {"commands": [], "timeout_ms": -1}}), "or equal to 0", "input[0].action.timeout_ms"),
    (item(**SHELL, environment={}), "Field required", "input[0].environment.type"),
    (item(**SHELL_OUTPUT | {"output": "x"}), "valid array", "input[0].output"),
    (item(**SHELL_OUTPUT | {"output": [{}]}), "Field required", "input[0].output[0].outcome"),
    (item(**SHELL_OUTPUT | {"output": [{"outcome": {"type": "x"}}]}), "'exit'", "input[0].output[0].outcome.type"),
    (item(**PATCH), "Field required", "input[0].operation"),
    (item(**PATCH, operation={"type": "move", "path": "x"}), "'create_file'", "input[0].operation.type"),
    (item(**PATCH, operation={"type": "delete_file"}), "Field required", "input[0].operation.path"),
    (item(type="apply_patch_call_output", call_id="c", status="x"), "'failed'", "input[0].status"),
    (item(type="mcp_list_tools"), "Field required", "input[0].server_label"),
    (item(type="mcp_list_tools", server_label="m", tools=[{}]), "Field required", "input[0].tools[0].name"),
    (item(type="mcp_list_tools", server_label="m", error=5), "an object", "input[0].error"),
    (item(**MCP_CALL | {"name": ""}), "at least 1", "input[0].name"),
    (item(**MCP_CALL | {"arguments": {}}), "valid string", "input[0].arguments"),
    (item(**MCP_CALL, output=[]), "valid string", "input[0].output"),
    (item(**MCP_CALL | {"type": "mcp_approval_request", "server_label": None}), "string", "input[0].server_label"),
    (item(**APPROVAL | {"approval_request_id": ""}), "at least 1", "input[0].approval_request_id"),
    (item(**APPROVAL | {"approve": "yes"}), "valid boolean", "input[0].approve"),
    (item(type="code_interpreter_call", code=5), "valid string", "input[0].code"),
    (item(type="code_interpreter_call", outputs=[{"type": "x"}]), "'logs' or 'image'", "input[0].outputs[0].type"),
    (item(type="web_search_call", action="x"), "an object", "input[0].action"),
    (item(type="web_search_call", action={"url": 5}), "valid string", "input[0].action.url"),
]

TOOLS = [
    ({"tools": [{"type": "mcp"}]}, "Field required", "tools[0].server_label"),
    (server(server_label="a b"), "pattern", "tools[0].server_label"),
    *[
        (server(server_label=label), f"labelled '{label}'", "tools[0].server_label")
        for label in ("functions", "assistant", "user", "system", "developer", "tool", "all")
    ],
    (server(server_url=5), "valid string", "tools[0].server_url"),
    *[
        (server(server_url=url), "http or https, with a host", "tools[0].server_url")
        for url in ("", "docs.example", "ftp://a", "file:///etc", "http://", "http://:80", "http://a:b", "http://[a")
    ],
    *[
        (server(server_url=url), "pattern", "tools[0].server_url")
        for url in ("http://a b", "http://a\n.example", "http://a\\@b", "http://a\x00")
    ],
    (server(server_url="http://" + "a" * 2048), "at most 2048", "tools[0].server_url"),
    *[
        (server(server_url=f"http://{user}@a.example"), "user or password is not allowed", "tools[0].server_url")
        for user in ("", "u", "u:p", ":p")
    ],
    (server(connector_id="c"), "exclude each other", "tools[0].connector_id"),
    (server(headers=["a"]), "an object", "tools[0].headers"),
    (server(headers={"a": 5}), "valid string", "tools[0].headers.a"),
    (server(headers={"a b": "x"}), "pattern", "tools[0].headers.a b"),
    (server(headers={"a": "x\r\nb: y"}), "pattern", "tools[0].headers.a"),
    (server(headers={"a": "\u00e9"}), "pattern", "tools[0].headers.a"),
    (server(headers={"a": "x", "A": "y"}), "should be unique", "tools[0].headers"),
    (server(headers={"Host": "a.example"}), "cannot be set", "tools[0].headers"),
    (server(headers={str(number): "" for number in range(51)}), "at most 50", "tools[0].headers"),
    (server(authorization=""), "pattern", "tools[0].authorization"),
    (server(authorization="a b"), "pattern", "tools[0].authorization"),
    (server(authorization="a", headers={"AUTHORIZATION": "b"}), "exclude", "tools[0].authorization"),
    (server(allowed_tools="f"), "an object", "tools[0].allowed_tools"),
    (server(allowed_tools=[5]), "valid string", "tools[0].allowed_tools[0]"),
    (server(allowed_tools={"tool_names": "f"}), "valid array", "tools[0].allowed_tools.tool_names"),
    (server(allowed_tools={"read_only": 1}), "valid boolean", "tools[0].allowed_tools.read_only"),
    (server(require_approval="sometimes"), "'always' or 'never'", "tools[0].require_approval"),
    (server(require_approval=[]), "an object", "tools[0].require_approval"),
    (server(require_approval={"never": []}), "an object", "tools[0].require_approval.never"),
    ({"tools": [{"type": "code_interpreter", "container": {}}]}, "required", "tools[0].container.type"),
    ({"tools": [{"type": "code_interpreter", "container": 5}]}, "an object", "tools[0].container"),
    ({"tools": [{"type": "shell", "environment": {"type": "x"}}]}, "'local'", "tools[0].environment.type"),
    (choice(type="mcp"), "Field required", "tool_choice.server_label"),
    (choice(type="mcp", server_label="m", name=5), "valid string", "tool_choice.name"),
    (
        choice(type="allowed_tools", mode="auto", tools=[{"type": "mcp"}]),
        "required",
        "tool_choice.tools[0].server_label",
    ),
]


@pytest.mark.parametrize(("body", "says", "param"), CALLS + TOOLS, ids=lambda value: json.dumps(value)[:60])
def test_bad_value_is_refused_with_its_place(body: Json, says: str, param: str) -> None:
    """The message describes the mistake, and ends with the place that ``param`` names."""
    message, found = refusal(json.dumps(body).encode())
    assert found == param
    assert says in message
    assert message.endswith(f" (at {param})")
