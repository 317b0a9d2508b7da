"""Tools that items bring stand in the prompt of a chat model where their item does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.tools import FunctionTool, McpTool, Tool, Toolset, tool_key
from tests.support.chat_templates import STRICT_TEMPLATE, text
from tests.support.harmony import conversation, function, message

pytestmark = pytest.mark.vllm

ASKED = message("user", "How warm is it?")
SEARCH = FunctionTool("tool_search", "Searches.", form="tool_search", runs_here=True)
CALL = items.ToolSearchCall("tsc_1", "call_1", {"query": "weather"}, "completed", "server")
WEATHER, ECHO = function("get_weather", description="Tells it."), McpTool("docs", "echo")
FOUND: tuple[dict[str, Any], ...] = (
    {"type": "function", "name": "get_weather"},
    {"type": "namespace", "name": "docs", "tools": [{"type": "function", "name": "echo"}]},
)


def toolset(*tools: Tool) -> Toolset:
    return Toolset((SEARCH, *tools), loaded=tuple(map(tool_key, tools)))


def found(*declared: dict[str, Any]) -> items.ToolSearchOutput:
    return items.ToolSearchOutput("tso_1", "call_1", declared, "completed", "server")


async def test_found_tools_are_the_result_of_the_search() -> None:
    before = await text(conversation(ASKED, tools=toolset()))
    after = await text(conversation(ASKED, CALL, found(*FOUND), tools=toolset(WEATHER, ECHO)))
    head = before.removesuffix("<|im_start|>assistant\n")
    assert after.startswith(head)
    rest = after.removeprefix(head)
    assert '"query": "weather"' in rest or '"query":"weather"' in rest
    _, _, answered = rest.partition("<tool_response>\n")
    declared = [json.loads(line) for line in answered.partition("\n</tool_response>")[0].splitlines()]
    assert [line["function"]["name"] for line in declared] == ["get_weather", "docs__echo"]


async def test_search_without_a_match_has_a_result() -> None:
    assert "No tool was found." in await text(conversation(ASKED, CALL, found(), tools=toolset()))
    hosted = found({"type": "code_interpreter"})
    assert "The tools are those described above." in await text(conversation(ASKED, CALL, hosted, tools=toolset()))


async def test_added_tools_are_instructions_in_their_place() -> None:
    added = items.AdditionalTools("at_1", "developer", FOUND[:1])
    before = await text(conversation(ASKED, tools=Toolset((SEARCH,))))
    after = await text(conversation(ASKED, added, ASKED, tools=toolset(WEATHER)))
    rest = after.removeprefix(before.removesuffix("<|im_start|>assistant\n"))
    assert rest.startswith("<|im_start|>system\nMore tools can be called from now on:\n{")
    assert '"name": "get_weather"' in rest
    leading = await text(conversation(added, ASKED, tools=toolset(WEATHER)))
    assert leading.index("get_weather") < leading.index("How warm")
    assert "More tools" not in leading


async def test_template_that_takes_no_instructions_here_has_them_first() -> None:
    added = items.AdditionalTools("at_1", "developer", FOUND[:1])
    rendered = await text(conversation(ASKED, added, ASKED, tools=toolset(WEATHER)), STRICT_TEMPLATE)
    assert rendered.index("get_weather") < rendered.index("How warm")


async def test_superseded_tools_are_in_the_head() -> None:
    compaction = items.Compaction("cmp_1", "")
    asked = conversation(ASKED, CALL, found(*FOUND), compaction, ASKED, tools=toolset(WEATHER, ECHO))
    rendered = await text(asked)
    assert rendered.index("get_weather") < rendered.index("How warm")
