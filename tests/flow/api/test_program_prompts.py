"""A program that sleeps leaves the engine its prefix: the next prompt begins with the last one and what was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.services.engines.scripted import Script
from penstock.services.tools import Toolbox
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.harmony import encode_by_letters
from tests.support.programs import host_of
from tests.support.sandboxes import available
from tests.support.tool_servers import answer_markup, join_calls, python_markup, respond, tool_server

pytestmark = pytest.mark.io

TOOLS = [
    {"type": "programmatic_tool_calling"},
    {
        "type": "function",
        "name": "ask",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        "allowed_callers": ["programmatic"],
    },
]
CODE = "answers = [await ask(n=n) for n in range(3)]\nprint(sum(answers))"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"


async def test_prompt_after_a_program_begins_with_the_last_one_and_its_tokens(tmp_path: Path) -> None:
    generated = tuple(encode_by_letters(join_calls(THOUGHT, python_markup(CODE))))
    answer = Script(load_encoding().encode_markup(answer_markup()), reason="stop")
    async with (
        host_of(await available("program")) as host,
        tool_server(tmp_path, toolbox=Toolbox({"program": host})) as served,
    ):
        served.engine.turns = [Script(generated, reason="stop"), answer]
        latest = await respond(served, "whole", {"tools": TOOLS, "input": "How much?"})
        served.engine.turns = [answer]
        assert latest.types == ["reasoning", "program", "function_call"]
        for number in range(3):
            (call,) = (item for item in latest.output if item["type"] == "function_call")
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": str(number)}
            following = {"previous_response_id": latest.response["id"], "input": [output], "tools": TOOLS}
            latest = await respond(served, "whole", following)
        first, second = (prompt.token_ids for prompt in served.engine.prompts)
    assert latest.types == ["program_output", "message"]
    seen = (*first, *generated)
    assert second[: len(seen)] == seen
    assert load_encoding().decode(second[len(seen) :]) == (
        "<|start|>python to=assistant<|channel|>analysis<|message|>3\n<|end|><|start|>assistant"
    )
    told = load_encoding().decode(first)
    assert "\n## python\n\n" in told
    assert "async def ask(n: int): ..." in told
