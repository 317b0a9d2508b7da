"""What a search for deferred tools finds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseToolSearchOutputItem

from penstock.pipeline.frames import LoadedTools
from penstock.pipeline.protocol.tools import (
    CustomTool,
    FunctionTool,
    Grammar,
    McpTool,
    Tool,
    Toolset,
    keys_of,
    tool_key,
)
from penstock.services.tool_search import (
    MOST_CHARACTERS,
    MOST_FOUND,
    ToolSearch,
    matches,
    search_tool,
    wire_form,
)

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: tuple[Tool, ...] = (
    FunctionTool("get_weather", "Tells how warm it is.", CITY),
    FunctionTool("listInvoices", "Lists what a customer owes.", namespace="crm"),
    FunctionTool("close_account", "Closes an account of a customer.", namespace="crm"),
    CustomTool("say", "Says a text aloud.", Grammar("lark", "start: /a/")),
    McpTool("docs", "search_pages", "Searches pages."),
)


def names(query: str, **settings: Any) -> list[str]:
    return [tool.name for tool in matches(query, Toolset(deferred=TOOLS, **settings))]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("weather", ["get_weather"]),
        ("invoice", ["listInvoices"]),
        ("the INVOICES of a customer", ["listInvoices", "close_account"]),
        ("crm", ["listInvoices", "close_account"]),
        ("city", ["get_weather"]),
        ("docs page", ["search_pages"]),
        ("quantum", []),
        ("", []),
    ],
)
def test_tools_match_by_their_words(query: str, found: list[str]) -> None:
    assert names(query)[: len(found) or None] == found


def test_only_tools_that_may_be_called_are_found() -> None:
    assert names("customer", allowed=(("crm", "close_account"),)) == ["close_account"]
    assert names("customer", allowed=(("crm", "*"),)) == ["listInvoices", "close_account"]
    assert names("customer", allowed=()) == []


def test_a_search_finds_a_few() -> None:
    many = tuple(FunctionTool(f"get_{at}", "Gets it.") for at in range(100))
    assert len(matches("get", Toolset(deferred=many))) == MOST_FOUND


@pytest.mark.parametrize("arguments", ["", "[]", '"weather"', "{}", '{"query": 5}', "[" * 100_000])
async def test_wrong_arguments_are_an_error_for_the_model(arguments: str) -> None:
    result = await ToolSearch(lambda: Toolset(deferred=TOOLS)).run("tool_search", arguments, 1.0)
    assert result.error
    assert result.data == LoadedTools(())


@given(st.lists(st.sampled_from(TOOLS), unique_by=tool_key))
def test_wire_form_has_the_keys_and_the_types_of_the_sdk(tools: list[Tool]) -> None:
    shown = wire_form(tools, {"crm": "Customers."})
    assert set(keys_of(shown)) == {tool_key(tool) for tool in tools}
    item = {"id": "tso_1", "execution": "server", "status": "completed", "type": "tool_search_output", "tools": shown}
    ResponseToolSearchOutputItem.model_validate_json(json.dumps(item), strict=True)


@given(st.text(max_size=40))
def test_any_query_finds_tools_that_share_a_word(query: str) -> None:
    assert len(names(query)) <= len(TOOLS)


def test_loading_moves_tools_out_of_the_deferred_ones() -> None:
    tools = Toolset((FunctionTool("ask"),), deferred=TOOLS).loading(wire_form(TOOLS[:2], {}))
    assert [tool.name for tool in tools.tools] == ["ask", "get_weather", "listInvoices"]
    assert tools.deferred == TOOLS[2:]
    assert tools.loaded == ((None, "get_weather"), ("crm", "listInvoices"))
    assert tools.loading([{"type": "function", "name": "unknown"}]) == tools


def test_description_of_the_search_is_bounded() -> None:
    many = [FunctionTool(f"function_{at}") for at in range(10_000)]
    assert len(search_tool(many, {}, ()).description or "") < MOST_CHARACTERS + 100
