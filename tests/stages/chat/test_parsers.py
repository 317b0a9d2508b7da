"""What vLLM's parsers do not read is made readable, or read without them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pipeline.frames import ChatTurn
from pipeline.protocol.tools import FunctionTool, Toolset
from stages.chat.model import Said
from tests.chat_families import FAMILIES, chat_model
from tests.stages.parse.chat.written import begun, parse, tokens, told

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's imports warn

ODD: dict[str, Any] = {
    "a schema that is true": {"type": "object", "properties": {"city": True}},
    "a schema that is none": {"type": "object", "properties": {"city": None}},
    "properties in a list": {"type": "object", "properties": ["city"]},
}
CALLS = {
    "glm45": "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    "qwen3_coder": (
        "</think>\n<tool_call>\n<function=look>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    ),
}


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("schema", ODD.values(), ids=ODD)
def test_row23_schemas_may_say_less_than_parsers_expect(family: str, schema: dict[str, Any]) -> None:
    """A property that may be anything is read as a text."""
    found = told(parse(family, CALLS[family], tools=Toolset((FunctionTool("look", parameters=schema),))))
    assert [(kind, name) for kind, name, _ in found] == [("FunctionCall", "look")]
    assert "Paris" in found[0][2]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schema", ODD.values(), ids=ODD)
def test_markup_is_described_for_any_schema(family: str, schema: dict[str, Any]) -> None:
    """No more than the shape of a call has to be known."""
    function = {"type": "function", "function": {"name": "look", "parameters": schema}}
    chat_model(family).parsers.calls([function], parallel=True)


def test_variables_that_no_parser_takes_leave_the_text(caplog: pytest.LogCaptureFixture) -> None:
    """They are the client's: its response is plain text, and does not fail."""
    with caplog.at_level(logging.WARNING):
        turn = begun("qwen3", ChatTurn({"enable_thinking": {}}))
        parser = chat_model("qwen3").parsers.start(turn, [])
    assert "No parser can be made" in caplog.text
    assert parser.feed(tokens("qwen3", "a")[0], "a") == [Said("a")]
    assert not parser.finish(cut=False)
