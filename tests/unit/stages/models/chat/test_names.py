"""The names under which a chat model knows the tools of a request."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.tools import (
    CustomTool,
    FunctionTool,
    HostedTool,
    McpTool,
    Tool,
    Toolset,
    tool_key,
)
from penstock.stages.models.chat.names import ToolNames, text_argument
from tests.support.harmony import PROGRAM

NAMEABLE = re.compile(r"[A-Za-z0-9_-]{1,64}")


def names_of(*tools: Tool) -> list[str]:
    names = ToolNames(Toolset(tools))
    return [names.of(tool) for tool in tools]


WORDS = st.text(alphabet="aA_.2é", min_size=1, max_size=3) | st.sampled_from(["x" * 64, "x" * 63 + "y", "y" * 70])
"""Names of functions and of MCP tools.  The alphabet is small, so that names collide."""
TOOLS = st.one_of(
    st.builds(FunctionTool, WORDS, namespace=st.none() | WORDS),
    st.builds(CustomTool, WORDS, namespace=st.none() | WORDS),
    st.builds(McpTool, WORDS, WORDS),
    st.sampled_from(kinds().tools),
)


@given(st.lists(TOOLS, max_size=12, unique_by=tool_key))
def test_every_tool_has_a_unique_function_name(tools: list[Tool]) -> None:
    names = ToolNames(Toolset(tuple(tools)))
    given_names = [names.of(tool) for tool in tools]
    assert len(set(given_names)) == len(tools)
    assert all(NAMEABLE.fullmatch(name) for name in given_names)
    assert [names.tool(name) for name in given_names] == tools


def test_plain_functions_keep_their_names() -> None:
    tools = (
        FunctionTool("get_weather"),
        CustomTool("note"),
        FunctionTool("spawn", namespace="team"),
        McpTool("docs", "ask"),
        HostedTool("browser", "search"),
        HostedTool("container", "exec"),
        HostedTool("python", "python"),
        HostedTool("program", "program"),
    )
    assert names_of(*tools) == [
        *("get_weather", "note", "team__spawn", "docs__ask"),
        *("browser__search", "container__exec", "python", "program"),
    ]


def test_colliding_name_is_numbered() -> None:
    """A plain function is never renamed, as the client expects its name in calls."""
    hosted, plain = HostedTool("browser", "search"), FunctionTool("browser__search")
    assert names_of(hosted, plain) == ["browser__search_2", "browser__search"]
    assert names_of(McpTool("a", "b.c"), McpTool("a", "b/c"), McpTool("a", "b c")) == ["a__b_c", "a__b_c_2", "a__b_c_3"]


@pytest.mark.parametrize(
    ("label", "name", "spelled"),
    [
        ("docs", "ask.now", "docs__ask_now"),
        ("my docs", "a/b", "my_docs__a_b"),
        ("docs", "größe", "docs__gr__e"),
        ("docs", "docs", "docs"),
        ("日本", "🧑", "_____"),
    ],
)
def test_odd_names_are_respelled(label: str, name: str, spelled: str) -> None:
    """MCP servers may name their tools freely, chat templates and grammars may not."""
    assert names_of(McpTool(label, name)) == [spelled]


def test_long_name_keeps_its_end() -> None:
    label = "server" * 10
    tools = (McpTool(label, "a" * 40), McpTool(label, "b" * 40), McpTool(f"other{label}", "a" * 40))
    first, second, third = names_of(*tools)
    assert first == f"{label[-22:]}__{'a' * 40}"
    assert second == f"{label[-22:]}__{'b' * 40}"
    assert third == f"{first[:60]}_2"


def test_names_match_in_any_case() -> None:
    upper, lower = FunctionTool("Read"), FunctionTool("read")
    names = ToolNames(Toolset((upper, lower)))
    assert (names.tool("Read"), names.tool("read"), names.tool("READ")) == (upper, lower, upper)
    assert names.tool("reed") is None


CALLS: dict[str, items.CallItem] = {
    "get_weather": items.FunctionCall("1", "c", "get_weather", "{}", "completed"),
    "team__spawn": items.FunctionCall("1", "c", "spawn", "{}", "completed", namespace="team"),
    "note": items.CustomToolCall("1", "c", "note", "", "completed"),
    "docs__ask": items.McpCall("1", "docs", "ask", "{}", "completed"),
    "docs__write_it": items.McpApprovalRequest("1", "docs", "write.it", "{}"),
    "python": items.CodeInterpreterCall("1", "", "here", "completed"),
    "program": items.Program("1", "c", "", ""),
    "browser__search": items.WebSearchCall("1", "completed", {"type": "search", "query": "x"}),
    "browser__open": items.WebSearchCall("1", "completed", {"type": "open_page", "url": "x"}),
    "browser__find": items.WebSearchCall("1", "completed", {"type": "find_in_page", "url": "x", "pattern": "y"}),
    "local_shell": items.LocalShellCall("1", "c", {"type": "exec", "command": []}, "completed"),
    "shell": items.ShellCall("1", "c", {"commands": []}, "completed"),
    "apply_patch": items.ApplyPatchCall("1", "c", {}, "completed"),
}


@pytest.mark.parametrize("name", CALLS)
def test_past_call_is_named_as_its_tool_would_be(name: str) -> None:
    assert ToolNames(Toolset()).of_call(CALLS[name]) == name


def test_programs_are_called_by_the_name_that_the_request_gives_them() -> None:
    names = ToolNames(Toolset((PROGRAM,)))
    assert names.of_call(CALLS["program"]) == names.of(PROGRAM) == "python"
    assert names_of(PROGRAM, FunctionTool("python")) == ["python_2", "python"]


def test_past_call_takes_the_current_name_of_its_tool() -> None:
    names = ToolNames(Toolset((FunctionTool("docs__ask"), McpTool("docs", "ask"))))
    assert names.of_call(CALLS["docs__ask"]) == "docs__ask_2"


def test_tools_with_text_input_have_one_argument() -> None:
    assert [text_argument(tool) for tool in (CustomTool("note"), HostedTool("python", "python"))] == ["input", "code"]
    assert text_argument(CALLS["note"]) == "input"
    assert text_argument(CALLS["python"]) == "code"
    assert text_argument(FunctionTool("f")) is None
    assert text_argument(HostedTool("browser", "search")) is None
    assert text_argument(CALLS["docs__ask"]) is None
