"""Programs in the prompts of chat models: calls of a function with the code, and what they printed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline.frames import TokenIds
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.tools import FunctionTool, Tool, Toolset
from tests.support.chat_families import TURN_END, chat_grammar
from tests.support.chat_templates import messages_in_brief, prompt, vocabulary
from tests.support.examples import examples
from tests.support.harmony import (
    PROGRAM,
    call,
    conversation,
    message,
    nested_calls,
    output,
    program,
    program_output,
    reasoning,
)

pytestmark = pytest.mark.vllm

WEATHER = FunctionTool("get_weather")
TOOLS = Toolset((PROGRAM, WEATHER), in_programs=(WEATHER,))
BESIDE_PYTHON = (replace(PROGRAM, spoken=""), *kinds()["python"].tools)
ASKED = message("user", "Hi")


def letters(text: str) -> TokenIds:
    """The text in tokens that no encoder would choose, with its marks."""
    pieces = vocabulary().marks_pattern.split(text)
    marks = [*vocabulary().marks_pattern.findall(text), ""]
    parts = (part for piece, mark in zip(pieces, marks, strict=True) for part in (*piece, mark))
    return tuple(token for part in parts for token in vocabulary().encode(part))


@pytest.mark.parametrize(
    ("tools", "name"), [((PROGRAM, WEATHER), "python"), (BESIDE_PYTHON, "program")], ids=["alone", "beside Python"]
)
def test_a_program_is_a_call_and_what_it_printed(tools: tuple[Tool, ...], name: str) -> None:
    history = [ASKED, program("print(1)"), *nested_calls(2), program_output("1"), message("assistant", "One.")]
    assert messages_in_brief(conversation(*history, tools=tools))[1:] == [
        {"role": "assistant", "tool_calls": [(name, {"code": "print(1)"})]},
        {"role": "tool", "tool_call_id": "call_p", "name": name, "content": "1"},
        {"role": "assistant", "content": "One."},
    ]


def test_calls_beside_a_program_stay_in_its_turn() -> None:
    """The turn of the model does not end with the output of a program that is not the last of its calls."""
    made, beside = program("1"), call("get_weather", "{}", "call_2")
    tokens = {made.id: letters("a"), beside.id: letters("b<|im_end|>")}
    request = conversation(
        ASKED, made, *nested_calls(1), program_output("1"), beside, output("18", "call_2"), tools=TOOLS
    )
    assert [message["role"] for message in messages_in_brief(replace(request, tokens=tokens))] == [
        *("user", "assistant", "tool", "tool")
    ]


async def test_programs_are_told_as_a_function_that_takes_code() -> None:
    told = replace(TOOLS, descriptions={"program": "Calls get_weather."})
    text = vocabulary().decode((await prompt(conversation(ASKED, tools=told))).token_ids)
    assert '"name": "python", "description": "Calls get_weather.", "parameters": {' in text
    assert '"code": {"type": "string", "description": "The program, in Python."}' in text


@given(st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Zs"]), min_size=1), st.integers(0, 3))
@examples(20)
async def test_a_prompt_after_a_program_begins_with_the_one_before_and_its_tokens(code: str, rounds: int) -> None:
    """However many responses the program took, as they added its calls alone."""
    thought, made = reasoning("Hm."), program(code)
    named = f'{{"name": "python", "arguments": {json.dumps({"code": code})}}}'
    written = ("<think>\nHm.\n</think>\n\n", f"<tool_call>\n{named}\n</tool_call><|im_end|>")
    tokens = {thought.id: letters(written[0]), made.id: letters(written[1])}
    history = [ASKED, thought, made, *nested_calls(rounds)]
    request = replace(conversation(program_output("18"), history=history, tools=TOOLS), tokens=tokens)
    seen = (*(await prompt(conversation(ASKED, tools=TOOLS))).token_ids, *letters("".join(written)))
    after = (await prompt(request)).token_ids
    assert after[: len(seen)] == seen
    assert "18" in vocabulary().decode(after[len(seen) :])
    assert "get_weather" not in vocabulary().decode(after[len(seen) :])


def test_a_program_can_be_required() -> None:
    model = chat_grammar(replace(TOOLS, choice="required", allowed=(("program", "program"),)))
    right = f'<tool_call>\n{{"name": "python", "arguments": {{"code": "print(1)"}}}}\n</tool_call>{TURN_END}'
    assert model.accepted(right) == right
    for wrong in ("Hello.", right.replace("python", "get_weather"), right.replace("code", "input")):
        assert not model.accepted(wrong).startswith(wrong)
