"""Names of tools in programs: each is an identifier, no two are the same, and each leads back to its tool."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.programs.names import RESERVED, Function, Names, python_names
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, HostedTool, McpTool, Tool, tool_key

ODD_NAMES = (
    "get-weather",
    "get.weather",
    "get_weather",
    "class",
    "print",
    "asyncio",
    "2fa",
    "__init__",
    "_",
    "ﬁle",
    "K",
)
NAMES = st.sampled_from(ODD_NAMES) | st.text(max_size=5) | st.text("a_2", max_size=4)


def schema(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def tools() -> st.SearchStrategy[list[Tool]]:
    spaces = st.none() | NAMES
    functions = st.builds(FunctionTool, NAMES, namespace=spaces)
    customs = st.builds(CustomTool, NAMES, namespace=spaces)
    served = st.builds(McpTool, NAMES, NAMES)
    hosted = st.sampled_from(kinds().tools)
    return st.lists(functions | customs | served | hosted, unique_by=tool_key)


@given(tools())
def test_each_tool_has_a_path_of_its_own(of_request: list[Tool]) -> None:
    names = Names(of_request)
    assert {tool_key(tool): tool for tool in of_request} == {key: it.tool for key, it in names.by_key.items()}
    assert names.by_path == {function.path: function for function in names.by_key.values()}
    assert len(names.by_path) == len(of_request)
    for function in names.functions:
        called = ast.parse(f"class X:\n async def x(): await {function.path}()", mode="exec")
        spelled = [
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(called)
            if isinstance(node, ast.Attribute | ast.Name)
        ]
        assert ".".join(reversed(spelled)) == function.path
        assert spelled[-1] not in RESERVED


@given(st.lists(NAMES), st.sets(NAMES))
def test_names_are_changed_only_where_they_must_be(wanted: list[str], reserved: set[str]) -> None:
    found = python_names(wanted, reserved)
    assert len(set(found)) == len(wanted)
    assert reserved.isdisjoint(found)
    for at, (name, given_name) in enumerate(zip(wanted, found, strict=True)):
        assert given_name.isidentifier()
        if name.isascii() and python_names([name], reserved) == [name] and name not in wanted[:at]:
            assert given_name == name


def test_a_thousand_clashes_are_resolved() -> None:
    wanted = [f"a{mark}" for mark in map(chr, range(0x2000, 0x23E8))]
    assert len(set(python_names([*wanted, *(f"a__{n}" for n in range(1_000))]))) == 2_000


def one(tool: Tool) -> Function:
    (function,) = Names([tool]).functions
    return function


@pytest.mark.parametrize(
    ("tool", "path"),
    [
        (FunctionTool("get_weather"), "get_weather"),
        (FunctionTool("get-weather"), "get_weather"),
        (FunctionTool("from"), "from_"),
        (FunctionTool("list"), "list_"),
        (FunctionTool("list", namespace="crm"), "crm.list"),
        (McpTool("my docs", "search.pages"), "my_docs.search_pages"),
        (HostedTool("browser", "open"), "web_search.open"),
        (HostedTool("python", "python"), "code_interpreter.python"),
        (FunctionTool("2fa"), "_2fa"),
        (FunctionTool("__class__"), "class__"),
        (FunctionTool("-"), "unnamed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_path_tells_the_place_of_a_tool(tool: Tool, path: str) -> None:
    assert one(tool).path == path


def test_a_function_of_the_client_keeps_its_name_before_others() -> None:
    names = Names(
        [FunctionTool("find", namespace="crm"), FunctionTool("crm"), FunctionTool("c.r.m"), FunctionTool("c-r-m")]
    )
    assert [function.path for function in names.functions] == ["crm", "c_r_m", "c_r_m_2", "crm_2.find"]


def test_parameters_lead_to_the_names_of_the_schema() -> None:
    function = one(FunctionTool("send", parameters=schema("from", "to", **{"reply-to": {}, "from": {}, "to": {}})))
    assert list(function.parameters.items()) == [("from_", "from"), ("to", "to"), ("reply_to", "reply-to")]
    assert function.required == {"from_", "to"}


def test_a_required_argument_without_a_schema_is_a_parameter() -> None:
    assert one(FunctionTool("send", parameters=schema("to", text={}))).parameters == {"to": "to", "text": "text"}


@pytest.mark.parametrize(
    ("tool", "name"), [(CustomTool("patch"), "input"), (HostedTool("python", "python"), "code")], ids=["custom", "code"]
)
def test_a_tool_that_takes_text_has_one_parameter(tool: Tool, name: str) -> None:
    function = one(tool)
    assert function.text_argument == name
    assert function.parameters == {name: name}
    assert function.required == {name}


UNIONS: dict[str, tuple[dict[str, Any], dict[str, str], set[str]]] = {
    "one of two": ({"anyOf": [schema("a", a={}), schema("a", "b", a={}, b={})]}, {"a": "a", "b": "b"}, {"a"}),
    "all of two": ({"allOf": [schema("a", a={}), schema(b={})]}, {"a": "a", "b": "b"}, {"a"}),
    "a base and one of two": (
        {**schema("c", c={}), "oneOf": [schema("a", a={}), schema("b", b={})]},
        {"c": "c", "a": "a", "b": "b"},
        {"c"},
    ),
    "a reference": ({"$ref": "#/$defs/A", "$defs": {"A": schema("a", a={})}}, {"a": "a"}, {"a"}),
}


@pytest.mark.parametrize(("parameters", "names", "required"), UNIONS.values(), ids=UNIONS)
def test_parameters_are_found_in_schemas_of_several_parts(
    parameters: dict[str, Any], names: dict[str, str], required: set[str]
) -> None:
    function = one(FunctionTool("f", parameters=parameters))
    assert function.parameters == names
    assert function.required == required


@pytest.mark.parametrize("parameters", [{}, {"anyOf": [schema("a", a={}), {}]}, {"type": "string"}])
def test_a_schema_that_names_no_arguments_leaves_them_open(parameters: dict[str, Any]) -> None:
    assert one(FunctionTool("f", parameters=parameters)).shape is None
