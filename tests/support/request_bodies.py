"""Request bodies as real clients write them, each shortened to one of a kind."""

from __future__ import annotations

from typing import Any

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "What it is like outside.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}

AGENTS_SDK: dict[str, Any] = {
    "model": "gpt-oss-20b",
    "instructions": "Be brief.",
    "include": [],
    "input": [
        {"role": "user", "content": "How is Oslo?"},
        {
            "id": "rs_1",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "They ask about weather."}],
        },
        {
            "id": "fc_1",
            "type": "function_call",
            "call_id": "call_1",
            "name": "get_weather",
            "arguments": '{"city":"Oslo"}',
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    ],
    "tools": [],
    "stream": True,
    "tool_choice": "auto",
}

LANGCHAIN = {
    "model": "gpt-oss-20b",
    "stream": False,
    "input": [
        {"type": "message", "role": "system", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How is Oslo?"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
    ],
    "tools": [{key: value for key, value in WEATHER.items() if key != "strict"}],
    "tool_choice": "required",
}

PYDANTIC_AI = {
    "model": "gpt-oss-20b",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": "How is Oslo?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    ],
    "tools": [WEATHER],
    "stream": False,
    "tool_choice": "required",
}

AI_SDK: dict[str, Any] = {
    "model": "gpt-oss-20b",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "How is Oslo?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "encrypted_content": "gAAAA",
            "summary": [{"type": "summary_text", "text": "…"}],
        },
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_text", "text": "rain"}, {"type": "input_image", "image_url": "data:,"}],
        },
    ],
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "stream": True,
}

CODEX: dict[str, Any] = {
    "model": "gpt-oss-20b",
    "stream": True,
    "store": False,
    "input": [
        {"type": "message", "role": "developer", "id": "msg_1", "content": [{"type": "input_text", "text": "Rules."}]},
        {"type": "message", "role": "user", "id": "msg_2", "content": [{"type": "input_text", "text": "List files."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
        {
            "type": "function_call",
            "status": "completed",
            "id": "fc_1",
            "name": "spawn_agent",
            "namespace": "multi_agent_v1",
            "arguments": "{}",
            "call_id": "call_1",
        },
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "done"},
    ],
    "tools": [
        {**WEATHER, "strict": False},
        {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [WEATHER]},
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "high", "context": "all_turns", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199c1d8-9c3f-7b62-a2c6-3f1f7e9f5d51",
    "client_metadata": {"turn_id": "1"},
    "text": {"verbosity": "low"},
}

CODEX_KNOWN_MODEL: dict[str, Any] = {
    **CODEX,
    "input": [
        {
            "type": "additional_tools",
            "role": "developer",
            "tools": [
                {
                    "type": "namespace",
                    "name": "functions",
                    "description": "Tools of the shell.",
                    "tools": [
                        {
                            "type": "custom",
                            "name": "exec",
                            "description": "Run code.",
                            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /[^\\0]+/"},
                        },
                        {"type": "function", "name": "wait", "parameters": {"type": "object"}, "strict": False},
                    ],
                }
            ],
        },
        {"type": "message", "role": "user", "id": "msg_2", "content": [{"type": "input_text", "text": "List files."}]},
        {
            "type": "custom_tool_call",
            "status": "completed",
            "id": "ctc_1",
            "call_id": "call_1",
            "name": "exec",
            "namespace": "functions",
            "input": "ls",
        },
        {"type": "custom_tool_call_output", "id": "ctco_1", "call_id": "call_1", "output": "README.md"},
    ],
    "reasoning": {"effort": "low"},
}
del CODEX_KNOWN_MODEL["tools"]

CODEX_APPLY_PATCH: dict[str, Any] = {
    **CODEX,
    "tools": [
        *CODEX["tools"],
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edit files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)*/'},
        },
        {"type": "tool_search", "execution": "client", "description": "More tools.", "parameters": {"type": "object"}},
    ],
}

AI_SDK_STORED: dict[str, Any] = {
    "model": "gpt-oss-20b",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "How is Oslo?"}]},
        {"type": "item_reference", "id": "rs_1"},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    ],
    "tools": [WEATHER],
    "tool_choice": "auto",
    "stream": True,
}

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
        {"type": "mcp_list_tools", "server_label": "gone", "tools": [], "error": {"message": "It is down."}},
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

STRUCTURED = {
    "model": "gpt-oss-20b",
    "input": "How is Oslo?",
    "text": {"format": {"type": "json_schema", "name": "weather", "schema": {"type": "object"}, "strict": True}},
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "name": "get_weather"},
    "metadata": {"order": "17"},
    "temperature": 0,
    "top_p": 1,
}

CLIENTS: dict[str, dict[str, Any]] = {
    "agents": AGENTS_SDK,
    "langchain": LANGCHAIN,
    "pydantic-ai": PYDANTIC_AI,
    "ai-sdk": AI_SDK,
    "ai-sdk stored": AI_SDK_STORED,
    "codex": CODEX,
    "codex apply_patch": CODEX_APPLY_PATCH,
    "codex known model": CODEX_KNOWN_MODEL,
    "structured": STRUCTURED,
    "server tools": SERVER_TOOLS,
    "client shells": CLIENT_SHELLS,
}

EVERYTHING: dict[str, Any] = {
    **CODEX,
    "metadata": {"order": "17"},
    "temperature": 1,
    "tool_choice": "auto",
    "stream_options": {"include_obfuscation": False},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "tools": [*CODEX_APPLY_PATCH["tools"], *SERVER_TOOLS["tools"], *CLIENT_SHELLS["tools"]],
    "stop": ["a", "b"],
    "previous_input_messages": [
        {"author": {"role": "tool", "name": "functions.f"}, "content": [{"type": "text", "text": "x"}]},
        {"role": "user", "content": "x", "channel": None},
    ],
    "input": [
        *CODEX_KNOWN_MODEL["input"],
        {"id": "rs_1"},
        *AGENTS_SDK["input"],
        *AI_SDK["input"],
        *SERVER_TOOLS["input"],
        *CLIENT_SHELLS["input"],
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}, {"type": "output_text", "text": "x"}]},
    ],
}
"""One valid body with most of the parameters."""
