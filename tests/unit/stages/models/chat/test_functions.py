"""Tools of every kind are functions to a chat model."""

from __future__ import annotations

from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, Grammar, HostedTool, McpTool, Toolset
from penstock.stages.models.chat.functions import functions
from penstock.stages.models.chat.names import ToolNames

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def offered(toolset: Toolset) -> dict[str, dict[str, object]]:
    """The offered functions by name; the name is removed from each function."""
    nested = functions(toolset, ToolNames(toolset))
    assert all(function["type"] == "function" for function in nested)
    return {function["function"].pop("name"): function["function"] for function in nested}


def test_functions_are_offered_unchanged() -> None:
    tools = (FunctionTool("one", "Says one.", SCHEMA, strict=True), FunctionTool("two"))
    assert offered(Toolset(tools)) == {
        "one": {"description": "Says one.", "parameters": SCHEMA, "strict": True},
        "two": {"parameters": {"type": "object", "properties": {}}},
    }


def test_namespace_description_precedes_that_of_its_first_tool() -> None:
    """Chat templates have no other place for it."""
    tools = (McpTool("docs", "ask", "Asks.", SCHEMA), McpTool("docs", "list", "Lists.", SCHEMA))
    descriptions = [
        tool["description"] for tool in offered(Toolset(tools, descriptions={"docs": "The docs."})).values()
    ]
    assert descriptions == ["The docs.\n\nAsks.", "Lists."]


def test_custom_tool_takes_one_text() -> None:
    free, held = CustomTool("free", "Anything."), CustomTool("held", None, Grammar("regex", "a+"))
    shown = offered(Toolset((free, held)))
    assert shown["free"]["description"] == "Anything."
    assert [list(tool["parameters"]["properties"].items()) for tool in shown.values()] == [  # type: ignore[index]
        [("input", {"type": "string", "description": "Any text."})],
        [("input", {"type": "string", "description": "Text that matches this regular expression:\na+"})],
    ]


def test_built_in_tools_have_harmony_descriptions() -> None:
    shown = offered(Toolset(kinds().tools))
    browser = ["browser__search", "browser__open", "browser__find"]
    assert sorted(shown) == sorted(["python", "program", *browser, "container__exec", "file_search__search"])
    assert list(shown["python"]["parameters"]["properties"]) == ["code"]  # type: ignore[index]
    assert all(tool["description"] for tool in shown.values())


def test_tools_of_an_operators_server_have_its_descriptions() -> None:
    tools = (HostedTool("python", "python", "Run it.", SCHEMA), HostedTool("python", "reset", "Forgets.", SCHEMA))
    shown = offered(Toolset(tools, descriptions={"python": "Python with numpy."}))
    assert list(shown) == ["python", "python__reset"]
    assert shown["python"]["description"] == "Python with numpy."
    assert list(shown["python"]["parameters"]["properties"]) == ["code"]  # type: ignore[index]
    assert shown["python__reset"] == {"description": "Forgets.", "parameters": SCHEMA}
