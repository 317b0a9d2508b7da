from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.api_clients import done_items
from tests.support.server import Server, running_server

Json = dict[str, Any]

USER = {"role": "user", "content": "Go."}
TOOLS = [{"type": "shell"}, {"type": "local_shell"}, {"type": "apply_patch"}]
BODY: Json = {"input": [USER], "tools": TOOLS}
EXIT = {"type": "exit", "exit_code": 0}
PATCH = {"type": "update_file", "path": "é.txt", "diff": "@@\n-a\n+b\n"}

Case = tuple[str, Json, Json, Json, str]
"""A tool, the model's arguments, the fields of the item, its output, and the rendered output."""

CASES: dict[str, Case] = {
    "shell": (
        "shell",
        {"commands": ["ls", "cat é"], "timeout_ms": 500},
        {"action": {"commands": ["ls", "cat é"], "timeout_ms": 500}},
        {"output": [{"stdout": "é.txt\n", "stderr": "", "outcome": EXIT}]},
        '[{"stdout":"é.txt\\n","stderr":"","outcome":{"type":"exit","exit_code":0}}]',
    ),
    "local_shell": (
        "local_shell",
        {"command": ["ls", "-l"], "working_directory": "/tmp"},
        {"action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "working_directory": "/tmp"}},
        {"output": "README.md"},
        "README.md",
    ),
    "patch": ("apply_patch", PATCH, {"operation": PATCH}, {"status": "completed", "output": None}, "completed"),
    "failed patch": (
        "apply_patch",
        {"type": "delete_file", "path": "a"},
        {"operation": {"type": "delete_file", "path": "a"}},
        {"status": "failed", "output": "No such file."},
        "No such file.",
    ),
}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[Server[ScriptedEngine], None]:
    async with running_server(ScriptedEngine(models=("tiny-gpt-oss",)), tmp_path) as served:
        yield served


def calling_script(name: str, arguments: Json) -> Script:
    text = json.dumps(arguments, ensure_ascii=False)
    call = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>"
    return Script(load_encoding().encode_markup(call))


def without_nulls(fields: Json) -> Json:
    return {key: value for key, value in fields.items() if value is not None}


@pytest.mark.defect("6")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_shell_or_patch_call_has_its_own_item(served: Server[ScriptedEngine], case: Case) -> None:
    name, arguments, fields, output, shown = case
    served.engine.script = calling_script(name, arguments)
    events = await served.stream_events(BODY)
    (call,) = done_items(events)
    response = events[-1]["response"]
    assert (events[-1]["type"], response["output"]) == ("response.completed", [call])
    assert (call["type"], call["status"]) == (f"{name}_call", "completed")
    assert {key: without_nulls(call[key]) for key in fields} == fields
    answer = {"type": f"{name}_call_output", "call_id": call["call_id"], **output}
    for body in ({"input": [USER, call, answer]}, {"previous_response_id": response["id"], "input": [answer]}):
        await served.stream_events(BODY | body)
        prompt = served.prompt_text()
        assert prompt.endswith(
            f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{shown}<|end|><|start|>assistant"
        )
        assert f" to=functions.{name}" in prompt


@pytest.mark.defect("40")
async def test_local_shell_may_be_answered_as_a_function(served: Server[ScriptedEngine]) -> None:
    """Some agents answer every call with a function's output."""
    served.engine.script = calling_script("local_shell", {"command": ["ls"]})
    (call,) = done_items(await served.stream_events(BODY))
    answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "README.md"}
    await served.stream_events(BODY | {"input": [USER, call, answer]})
    prompt = served.prompt_text()
    assert prompt.endswith(
        "<|start|>functions.local_shell to=assistant<|channel|>commentary<|message|>README.md<|end|><|start|>assistant"
    )


@pytest.mark.parametrize("name", ["shell", "local_shell", "apply_patch"])
async def test_call_without_an_action_never_reaches_the_client(served: Server[ScriptedEngine], name: str) -> None:
    served.engine.script = calling_script(name, {"input": "rm -rf build"})
    events = await served.stream_events(BODY)
    response = events[-1]["response"]
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == ["reasoning", "reasoning"]
    assert len(served.engine.prompts) == 2
    assert "Error: the call was not made. " in served.prompt_text()


async def test_model_reads_which_functions_it_can_call(served: Server[ScriptedEngine]) -> None:
    served.engine.script = calling_script("rm", {})
    output = (await served.stream_events(BODY))[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "reasoning"]
    assert (
        "<|start|>functions.rm to=assistant<|channel|>commentary<|message|>Error: there is no tool 'functions.rm'. "
        "The tools that can be called are functions.shell, functions.local_shell, functions.apply_patch.<|end|>"
    ) in served.prompt_text()


@pytest.mark.parametrize("size", [1, 1000])
async def test_cut_call_is_incomplete(served: Server[ScriptedEngine], size: int) -> None:
    markup = '<|channel|>commentary to=functions.shell <|constrain|>json<|message|>{"commands":["rm -rf build'
    served.engine.script = Script(load_encoding().encode_markup(markup), chunk_size=size, reason="length")
    response = (await served.stream_events(BODY))[-1]["response"]
    assert response["status"] == "incomplete"
    assert [(item["type"], item["status"]) for item in response["output"]] == [("reasoning", "incomplete")]
    hidden = (await served.stream_events(BODY | {"include_reasoning": False}))[-1]["response"]
    assert (hidden["status"], hidden["output"]) == ("incomplete", [])
