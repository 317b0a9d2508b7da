"""Request bodies with tools that are not functions: those that a server runs, and the shells of clients."""

from __future__ import annotations

from typing import Any

SERVER_TOOLS: dict[str, Any] = {
    "model": "gpt-oss-20b",
    "input": [
        {"role": "user", "content": "What is new?"},
        {
            "id": "mcpl_1",
            "type": "mcp_list_tools",
            "server_label": "docs",
            "tools": [
                {"name": "ask", "description": None, "input_schema": {"type": "object"}, "annotations": {"x": 1}},
                {"name": "read", "input_schema": {}},
            ],
            "error": None,
        },
        {
            "type": "mcp_list_tools",
            "server_label": "gone",
            "tools": [],
            "error": {"message": "It is down."},
        },
        {
            "id": "mcp_1",
            "type": "mcp_call",
            "server_label": "docs",
            "name": "ask",
            "arguments": "{}",
            "output": "Nothing.",
            "error": None,
            "approval_request_id": None,
            "status": "completed",
        },
        {"type": "mcp_call", "server_label": "docs", "name": "read", "arguments": "{}", "error": "No such page."},
        {"id": "mcpr_1", "type": "mcp_approval_request", "server_label": "docs", "name": "ask", "arguments": "{}"},
        {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": False, "reason": "Not now."},
        {
            "id": "ci_1",
            "type": "code_interpreter_call",
            "code": "print(1)",
            "container_id": "cntr_1",
            "outputs": [{"type": "logs", "logs": "1"}, {"type": "image", "url": "data:,"}],
            "status": "interpreting",
        },
        {
            "id": "ws_1",
            "type": "web_search_call",
            "status": "completed",
            "action": {
                "type": "search",
                "query": "news",
                "queries": ["news"],
                "sources": [{"type": "url", "url": "u"}],
            },
        },
        {"type": "web_search_call", "action": {"type": "find_in_page", "url": "https://a.example", "pattern": "x"}},
    ],
    "tools": [
        {
            "type": "mcp",
            "server_label": "docs",
            "server_url": "https://docs.example/mcp?key=1",
            "server_description": "Documents.",
            "headers": {"X-Key": "abc"},
            "allowed_tools": {"tool_names": ["ask", "read"], "read_only": True},
            "require_approval": {"always": {"tool_names": ["ask"]}, "never": {"read_only": True}},
        },
        {
            "type": "mcp",
            "server_label": "more",
            "server_url": "http://more.example:8000",
            "authorization": "abc",
            "allowed_tools": ["ask"],
            "require_approval": "never",
        },
        {"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "1g", "file_ids": []}},
        {"type": "web_search", "search_context_size": "low"},
        {"type": "shell", "environment": {"type": "container_auto"}},
    ],
    "tool_choice": {"type": "mcp", "server_label": "docs", "name": "ask"},
    "include": ["code_interpreter_call.outputs", "web_search_call.action.sources"],
    "max_tool_calls": 3,
}

CLIENT_SHELLS: dict[str, Any] = {
    "model": "gpt-oss-20b",
    "input": [
        {"role": "user", "content": "List files."},
        {
            "id": "lsh_1",
            "type": "local_shell_call",
            "call_id": "call_1",
            "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 10, "working_directory": "/"},
            "status": "completed",
        },
        {"type": "local_shell_call_output", "id": "call_1", "output": '{"output": "README.md"}'},
        {
            "type": "shell_call",
            "call_id": "call_2",
            "action": {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": 100},
            "environment": {"type": "local"},
        },
        {
            "type": "shell_call_output",
            "call_id": "call_2",
            "max_output_length": 100,
            "output": [
                {"stdout": "README.md", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "", "outcome": {"type": "timeout"}},
            ],
        },
        {
            "type": "apply_patch_call",
            "call_id": "call_3",
            "operation": {"type": "update_file", "path": "a.txt", "diff": "@@\n-a\n+b\n"},
            "status": "completed",
        },
        {"type": "apply_patch_call_output", "call_id": "call_3", "status": "failed", "output": "No such file."},
    ],
    "tools": [{"type": "shell", "environment": {"type": "local"}}, {"type": "local_shell"}, {"type": "apply_patch"}],
    "tool_choice": {"type": "apply_patch"},
}
