"""The recorded body of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.pipeline.recordings.redaction import redacted_request

SERVER: dict[str, Any] = {
    "type": "mcp",
    "server_label": "wiki",
    "server_url": "https://wiki.example/canary?key=canary",
    "headers": {"X-Key": "canary"},
    "authorization": "canary",
    "unknown": "canary",
}
SHOWN: dict[str, Any] = {"type": "mcp", "server_label": "wiki", "server_url": "https://wiki.example/<redacted>"}
POLICY = {"type": "allowlist", "domain_secrets": [{"domain": "a.example", "name": "KEY", "value": "canary"}]}


def redacted(**body: Any) -> dict[str, Any]:
    return redacted_request(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ({"tools": [SERVER]}, {"tools": [SHOWN]}),
        ({"tool_choice": SERVER | {"name": "ask"}}, {"tool_choice": SHOWN | {"name": "ask"}}),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [SERVER]}},
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [SHOWN]}},
        ),
        (
            {"input": ["Hi", {"type": "additional_tools", "tools": [SERVER]}]},
            {"input": ["Hi", {"type": "additional_tools", "tools": [SHOWN]}]},
        ),
        (
            {"tools": [{"type": "code_interpreter", "container": {"type": "auto", "network_policy": POLICY}}]},
            {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]},
        ),
        (
            {"tool_choice": {"type": "shell", "environment": {"type": "container_auto", "network_policy": POLICY}}},
            {"tool_choice": {"type": "shell", "environment": {"type": "container_auto"}}},
        ),
        ({"cache_salt": "canary", "api_key": "canary", "store": False}, {"store": False}),
    ],
)
def test_secrets_are_left_out_at_any_place(sent: dict[str, Any], shown: dict[str, Any]) -> None:
    assert redacted(**sent) == shown


def test_parameters_named_like_secrets_stay() -> None:
    """The parameters of a function may have any names."""
    properties = {name: {"type": "string"} for name in ("headers", "authorization", "tools", "network_policy")}
    function = {"type": "function", "name": "fetch", "parameters": {"type": "object", "properties": properties}}
    body: dict[str, Any] = {"input": "Hi", "tool_choice": "auto", "tools": [function]}
    assert redacted(**body) == body


def test_malformed_url_is_left_out() -> None:
    """A tool choice is checked less strictly than a tool, but is redacted as well."""
    choice: dict[str, Any] = {"type": "mcp", "server_label": "wiki", "server_url": ["canary"]}
    assert "canary" not in str(redacted(tool_choice=choice))
