"""Text parts of one message, as a template reads them: the same for each dialect and role."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.models.chat.load import ChatOptions
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.standalone import ModelFiles, load_from_files
from tests.support.paths import TINY_QWEN
from tests.support.server import running_server, script

TEMPLATE = "{% for message in messages %}{{ [message.role, message.content] | tojson }}\n{% endfor %}"


def texts(kind: str) -> list[dict[str, str]]:
    return [{"type": kind, "text": "one"}, {"type": kind, "text": "two"}]


ASKED: dict[str, Any] = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}

BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/responses", "system"): {"input": [{"role": "system", "content": texts("input_text")}, ASKED]},
    ("/v1/responses", "developer"): {"input": [ASKED, {"role": "developer", "content": texts("input_text")}]},
    ("/v1/responses", "user"): {"input": [{"role": "user", "content": texts("input_text")}]},
    ("/v1/responses", "assistant"): {
        "input": [ASKED, {"role": "assistant", "content": texts("output_text"), "type": "message"}, ASKED]
    },
    ("/v1/responses", "tool"): {
        "input": [
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": texts("input_text")},
        ]
    },
    ("/v1/responses", "custom tool"): {
        "input": [
            {"type": "custom_tool_call", "call_id": "c1", "name": "look", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": texts("input_text")},
        ]
    },
    ("/v1/chat/completions", "system"): {"messages": [{"role": "system", "content": texts("text")}, ASKED]},
    ("/v1/chat/completions", "developer"): {"messages": [ASKED, {"role": "developer", "content": texts("text")}]},
    ("/v1/chat/completions", "user"): {"messages": [{"role": "user", "content": texts("text")}]},
    ("/v1/chat/completions", "assistant"): {
        "messages": [ASKED, {"role": "assistant", "content": texts("text")}, ASKED]
    },
    ("/v1/chat/completions", "tool"): {
        "messages": [
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": texts("text")},
        ]
    },
    ("/v1/messages", "user"): {"messages": [{"role": "user", "content": texts("text")}]},
    ("/v1/messages", "assistant"): {"messages": [ASKED, {"role": "assistant", "content": texts("text")}, ASKED]},
}
TEXTS_IN_ALL_FORMATS: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/messages", "system"): {"messages": [ASKED], "system": texts("text")},
    ("/v1/messages", "tool"): {
        "messages": [
            ASKED,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}]},
            {"role": "user", "content": [{**RESULT, "content": texts("text")}]},
        ]
    },
}
"""What `vllm serve` joins before it reads the format, too."""


@cache
def model_with(content_format: Any) -> ChatModel:
    options = ChatOptions(chat_template=TEMPLATE, chat_template_content_format=content_format)
    return load_from_files(ModelFiles(str(TINY_QWEN)), options)


@pytest.mark.parametrize("content_format", ["auto", "string", "openai"])
@pytest.mark.parametrize(("path", "role"), [*BODIES, *TEXTS_IN_ALL_FORMATS])
async def test_texts_of_a_message_are_what_the_format_says(
    tmp_path: Path, path: str, role: str, content_format: Any
) -> None:
    model = model_with(content_format)
    body = {**BODIES, **TEXTS_IN_ALL_FORMATS}[path, role]
    if path == "/v1/messages":
        body = {**body, "model": "tiny", "max_tokens": 16}
    async with running_server(ScriptedEngine(script("")), tmp_path, model=model) as served:
        status, answer = await served.post(body, path)
        assert status == 200, answer
        shown = model.vocabulary.decode(served.engine.prompts[0].token_ids)
    contents = dict(map(json.loads, shown.splitlines()))
    read = "tool" if role == "custom tool" else "system" if role == "developer" else role
    joined = "one\ntwo"
    if content_format != "openai" or read == "tool":
        assert contents[read] == joined
    elif (path, role) in BODIES:
        assert contents[read] == texts("text")
    else:
        assert contents[read] == [{"type": "text", "text": joined}]
