"""A parser of one's own, from the options to the items of a turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.frames import ChatTurn, GenerationFinished
from penstock.stages.models.chat.load import ChatOptions
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, ReasoningPiece
from penstock.stages.models.chat.standalone import ModelFiles, load_from_files
from penstock.testing import check_parser
from tests.examples.a_parser_of_your_own import Lines, calls, thoughts
from tests.support import parsed_output
from tests.support.paths import TINY_QWEN

FILE = Path(__file__).with_name("a_parser_of_your_own.py")
PARIS = (CallPiece("get_weather"), ArgumentsPiece('{"city": "Paris"}'))
MARKED = '<call>{"name": "get_weather", "arguments": {"city": "Paris"}}</call>'
LINES = '# Hm.\nI look.\n! get_weather {"city": "Paris"}\n'


def test_they_keep_all_rules() -> None:
    check_parser(calls, {f"I look.{MARKED}": [ContentPiece("I look."), *PARIS]})
    check_parser(thoughts, {"<muse>Hm.</muse>Yes.": [ReasoningPiece("Hm."), ContentPiece("Yes.")]})
    check_parser(Lines, {LINES: [ReasoningPiece("Hm.\n"), ContentPiece("I look.\n"), *PARIS]})


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("reasoning", "tool_calls", "output"),
    [("thoughts", "calls", f"<muse>Hm.</muse>I look.{MARKED}"), ("Lines", "Lines", LINES)],
)
def test_options_name_them(reasoning: str, tool_calls: str, output: str) -> None:
    options = ChatOptions(f"{FILE}:{reasoning}", f"{FILE}:{tool_calls}")
    model = load_from_files(ModelFiles(str(TINY_QWEN)), options)
    started = parsed_output.turn_started(tools=parsed_output.CHAT_TOOLS, chat=ChatTurn())
    written = parsed_output.token_chunks(model.vocabulary.encode(output))
    end = GenerationFinished("stop", 0, 0.0)
    items = parsed_output.parsed_items(parsed_output.parse_chat_frames(model, [started, *written, end]))
    assert parsed_output.items_in_brief(items) == [
        ("Reasoning", "", "Hm."),
        ("Message", "", "I look."),
        ("FunctionCall", "get_weather", '{"city": "Paris"}'),
    ]
