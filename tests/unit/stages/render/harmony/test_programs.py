"""Programs in the prompt of gpt-oss: it writes them for its Python, and reads what they print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline.frames import GenerationFinished, ItemClosed, ProgramOpened, TokenChunk
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.tools import FunctionTool, Tool, Toolset
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.render.harmony.render import RenderHarmony
from tests.support.harmony import (
    PROGRAM,
    accepted_markup,
    code_call,
    conversation,
    encode_by_letters,
    grammar_for,
    message,
    nested_calls,
    program,
    program_output,
    prompt_ids,
    prompt_text,
    reasoning,
)
from tests.support.parsed_output import parse_harmony_frames, turn_started

WEATHER = FunctionTool("get_weather")
TOOLS = Toolset((PROGRAM, WEATHER), in_programs=(WEATHER,))
BESIDE_PYTHON = (replace(PROGRAM, spoken=""), *kinds()["python"].tools)
ASKED = message("user", "Hi")
NEXT = "<|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm.<|end|>{NEXT}"
HEADERS = ("<|channel|>analysis to=python code", " to=python<|channel|>analysis code", "<|channel|>analysis to=python")
CODES = st.text(st.characters(codec="ascii"), min_size=1).filter(lambda text: "<|" not in text)


def whole_prompt(tools: Toolset) -> str:
    return load_encoding().decode(prompt_ids(conversation(ASKED, tools=tools)))


@pytest.mark.parametrize(
    ("tools", "name"), [((PROGRAM, WEATHER), "python"), (BESIDE_PYTHON, "program")], ids=["alone", "beside Python"]
)
def test_a_program_is_a_call_and_what_it_printed(tools: tuple[Tool, ...], name: str) -> None:
    history = [ASKED, program("print(1)"), *nested_calls(2), program_output("1")]
    assert prompt_text(conversation(*history, tools=tools)).endswith(
        f"Hi<|end|>{NEXT} to={name}<|channel|>analysis code<|message|>print(1)<|call|>"
        f"<|start|>{name} to=assistant<|channel|>analysis<|message|>1<|end|>{NEXT}"
    )


def test_programs_are_told_under_the_name_by_which_they_are_called() -> None:
    told = whole_prompt(replace(TOOLS, descriptions={"program": "Calls get_weather."}))
    assert "\n# Tools\n\n## python\n\nCalls get_weather.\n\n# Valid" in told
    both = whole_prompt(Toolset(BESIDE_PYTHON, descriptions={"program": "Calls.", "python": "Computes."}))
    assert "## program\n\nCalls.\n\n## python\n\nComputes.\n\n# Valid" in both


@given(CODES, st.sampled_from(HEADERS), st.sampled_from(["", THOUGHT]), st.integers(0, 3))
def test_a_prompt_after_a_program_begins_with_the_one_before_and_its_tokens(
    code: str, header: str, thought: str, rounds: int
) -> None:
    """However many responses the program took, as they added its calls alone."""
    render = RenderHarmony(load_encoding()).prompt
    generated = tuple(encode_by_letters(f"{thought}{header}<|message|>{code}<|call|>"))
    frames = parse_harmony_frames(
        load_encoding(), [turn_started(tools=TOOLS), TokenChunk(generated), GenerationFinished("stop", 0, 0.0)]
    )
    assert any(isinstance(frame, ProgramOpened) for frame in frames)
    closed = [frame.token_ids for frame in frames if isinstance(frame, ItemClosed)]
    written: list[items.Item] = [*([reasoning("Hm.")] if thought else []), program(code)]
    history = [ASKED, *written, *nested_calls(rounds)]
    tokens = {item.id: ids for item, ids in zip(written, closed, strict=True)}
    request = replace(conversation(program_output("18"), history=history, tools=TOOLS), tokens=tokens)
    seen = (*render(conversation(ASKED, tools=TOOLS)).token_ids, *generated)
    after = render(request).token_ids
    assert after[: len(seen)] == seen
    assert load_encoding().decode(after[len(seen) :]) == (
        f"<|start|>python to=assistant<|channel|>analysis<|message|>18<|end|>{NEXT}"
    )


def test_a_function_of_programs_alone_is_not_shown() -> None:
    assert "get_weather" not in whole_prompt(Toolset((PROGRAM,), in_programs=(WEATHER,)))


def test_a_program_can_be_required() -> None:
    required = replace(TOOLS, choice="required", allowed=(("program", "program"),))
    rules = grammar_for(required)
    for header in HEADERS[:2]:
        whole = f"{THOUGHT}{header}<|message|>print({{'\n<|call|>"
        assert accepted_markup(rules, whole) == whole
    for wrong in ("<|channel|>commentary to=functions.get_weather", "<|channel|>final"):
        assert not accepted_markup(rules, wrong).startswith(wrong)


def test_a_program_beside_earlier_python_keeps_both_apart() -> None:
    """A client adds or removes Python between two requests."""
    history: list[items.Item] = [ASKED, code_call("1", "1"), program("2"), program_output("2")]
    text = prompt_text(conversation(*history, tools=BESIDE_PYTHON))
    assert " to=python<|channel|>analysis code<|message|>1<|call|>" in text
    assert " to=program<|channel|>analysis code<|message|>2<|call|>" in text
