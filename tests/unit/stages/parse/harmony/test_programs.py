"""Programs in the output of gpt-oss: what it writes to its Python."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.tools import FunctionTool, Toolset
from penstock.stages.models.harmony.vocabulary import HarmonyEncoding
from tests.support.harmony import PROGRAM
from tests.support.parsed_output import parse_harmony_text

WEATHER = FunctionTool("get_weather")
TOOLS = Toolset((PROGRAM, WEATHER), in_programs=(WEATHER,))
BESIDE_PYTHON = Toolset((replace(PROGRAM, spoken=""), *kinds()["python"].tools))


@pytest.mark.parametrize("recipient", ["python", "python.exec", "Python", "program", "functions.python"])
@pytest.mark.parametrize("header", ["<|channel|>analysis to={} code", " to={}<|channel|>commentary json"])
def test_a_message_to_python_is_a_program(header: str, recipient: str, encoding: HarmonyEncoding) -> None:
    text = f"{header.format(recipient)}<|message|>print(1)<|call|>"
    (item,) = parse_harmony_text(encoding, text, tools=TOOLS)
    assert (item.kind, item.text, item.complete, item.repairs) == ("Program", "print(1)", True, ())


@pytest.mark.parametrize(("recipient", "kind"), [("python", "CodeCall"), ("program", "Program")])
def test_python_beside_programs_keeps_its_name(recipient: str, kind: str, encoding: HarmonyEncoding) -> None:
    text = f"<|channel|>analysis to={recipient} code<|message|>print(1)<|call|>"
    (item,) = parse_harmony_text(encoding, text, tools=BESIDE_PYTHON)
    assert item.kind == kind


def test_a_function_of_programs_alone_is_not_called(encoding: HarmonyEncoding) -> None:
    only = Toolset((PROGRAM,), in_programs=(WEATHER,))
    text = "<|channel|>commentary to=functions.get_weather json<|message|>{}<|call|>"
    (item,) = parse_harmony_text(encoding, text, tools=only)
    assert (item.kind, item.repairs) == ("Reasoning", ("undeclared tool",))
