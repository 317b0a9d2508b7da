"""Programs in the output of chat models: calls of the function that takes code."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.pipeline.frames import GenerationFinished, TokenFrame
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.tools import FunctionTool, Toolset
from tests.support.call_markup import CALL_MARKUP, CITY, END, marked_model
from tests.support.harmony import PROGRAM
from tests.support.parsed_output import ParsedItem, parse_chat_frames, parsed_items, token_chunks, turn_started

pytestmark = pytest.mark.vllm

WEATHER = FunctionTool("get_weather")
TOOLS = Toolset((PROGRAM, WEATHER), in_programs=(WEATHER,))
BESIDE_PYTHON = Toolset((replace(PROGRAM, spoken=""), *kinds()["python"].tools))
CODE = "print(1)"


def called(parser: str, name: str, tools: Toolset, argument: str = "code") -> ParsedItem:
    markup = CALL_MARKUP[parser].replace("get_weather", name).replace("city", argument).replace(CITY, CODE)
    chunks = token_chunks(marked_model(parser).vocabulary.encode(markup + END))
    frames: list[TokenFrame] = [turn_started(tools=tools), *chunks, GenerationFinished("stop", 0, 0.0)]
    (item,) = parsed_items(parse_chat_frames(marked_model(parser), frames))
    return item


@pytest.mark.parametrize("parser", CALL_MARKUP)
def test_a_call_of_python_is_a_program_in_every_markup(parser: str) -> None:
    item = called(parser, "python", TOOLS)
    assert (item.kind, item.text, item.complete) == ("Program", CODE, True)


@pytest.mark.parametrize(("name", "kind"), [("python", "CodeCall"), ("program", "Program")])
def test_python_beside_programs_keeps_its_name(name: str, kind: str) -> None:
    item = called("hermes", name, BESIDE_PYTHON)
    assert (item.kind, item.text) == (kind, CODE)


def test_a_function_of_programs_alone_is_not_called() -> None:
    item = called("hermes", "get_weather", Toolset((PROGRAM,), in_programs=(WEATHER,)), "city")
    assert (item.kind, item.repairs) == ("Reasoning", ("undeclared tool",))
