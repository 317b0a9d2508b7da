"""What the model reads of programs: each function is a stub that compiles, and says what its schema says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from penstock.extensions.programs.names import Names
from penstock.extensions.programs.python_types import MOST_LEVELS, python_type
from penstock.extensions.programs.signatures import RULES, described
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.tools import (
    CustomTool,
    FunctionTool,
    Grammar,
    HostedTool,
    McpTool,
    Tool,
    Toolset,
    tool_key,
)
from penstock.stages.models.harmony.schema import MOST_PROMPT_INLINE_CHARACTERS, Inlining, read

STRING = {"type": "string"}
HOSTILE = st.text("\"\\'\n\r\x00\u2028# a`\ud800", max_size=12) | st.text(max_size=6)
KEYS = st.sampled_from(("a", "b-c", "from", "self", "2", "", "others", "args")) | HOSTILE
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | HOSTILE,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(HOSTILE, inner, max_size=2),
    max_leaves=4,
)
TYPES = st.sampled_from(("string", "number", "integer", "boolean", "null", "object", "array", "file"))


def _parts(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(KEYS, inner, max_size=3)},
        optional={"required": st.lists(KEYS, max_size=2), "additionalProperties": inner | st.booleans(), **_NOTES},
    )
    arrays = st.fixed_dictionaries({"type": st.just("array"), "items": inner}, optional=_NOTES)
    several = st.lists(inner, min_size=1, max_size=3)
    unions = st.builds(lambda key, parts: {key: parts}, st.sampled_from(("anyOf", "oneOf", "allOf")), several)
    return objects | arrays | unions | st.builds(lambda a, b: {**a, **b}, objects, unions)


_NOTES: dict[str, st.SearchStrategy[Any]] = {
    "description": HOSTILE,
    "default": VALUES,
    "examples": st.lists(VALUES, max_size=2),
    "title": HOSTILE,
}
_SIMPLE = st.fixed_dictionaries(
    {}, optional={"type": TYPES | st.lists(TYPES, max_size=3), "enum": st.lists(VALUES, max_size=3), **_NOTES}
) | st.fixed_dictionaries({"const": VALUES}, optional=_NOTES)
SCHEMAS = st.recursive(
    _SIMPLE | VALUES | st.sampled_from(({"$ref": "#"}, {"$ref": "#/properties/a"})), _parts, max_leaves=8
)


@st.composite
def toolsets(draw: st.DrawFn) -> Toolset:
    spaces = st.sampled_from((None, "crm", "my docs"))
    descriptions = st.none() | HOSTILE
    parameters = (
        st.none() | st.dictionaries(st.just("$ref"), st.just("#/x")) | SCHEMAS.filter(lambda it: isinstance(it, dict))
    )
    outputs = st.just(UNSET) | SCHEMAS.filter(lambda it: isinstance(it, dict))
    named = st.builds(FunctionTool, KEYS, descriptions, parameters, namespace=spaces, output_schema=outputs)
    served = st.builds(McpTool, st.just("docs"), KEYS, descriptions, parameters)
    custom = st.builds(CustomTool, KEYS, descriptions, namespace=spaces)
    tools = draw(st.lists(named | served | custom | st.sampled_from(kinds().tools), max_size=4, unique_by=tool_key))
    return Toolset(
        in_programs=tuple(tools), descriptions=draw(st.dictionaries(st.just("crm") | st.just("docs"), HOSTILE))
    )


def stubs(text: str) -> ast.Module:
    """The functions of a description, as Python reads them."""
    assert text.startswith(RULES)
    code = text.removeprefix(RULES)
    compile(code, "stubs", "exec")
    return ast.parse(code)


def declared(tree: ast.Module) -> Iterator[tuple[str, ast.AsyncFunctionDef]]:
    """Each function by its path; there is nothing else."""
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for member in members:
            if isinstance(member, ast.AsyncFunctionDef):
                yield prefix + member.name, member
            else:
                assert prefix
                assert member is members[0]
                assert isinstance(member, ast.Expr)
                assert isinstance(member.value, ast.Constant)


def words(text: str | None) -> list[str]:
    """The words of a text, without what a prompt does not show."""
    return "".join(
        " " if each < " " or each == "\x7f" or "\ud800" <= each < "\ue000" else each for each in text or ""
    ).split()


@given(toolsets())
def test_each_function_is_a_stub_of_its_parameters_and_description(tools: Toolset) -> None:
    names = Names(tools.in_programs or ())
    found = dict(declared(stubs(described(tools))))
    assert found.keys() == names.by_path.keys()
    for path, function in names.by_path.items():
        stub = found[path].args
        optional = len(stub.args) - len(stub.defaults)
        assert [each.arg for each in stub.args] == list(function.parameters)
        assert {each.arg for each in stub.args[:optional]} == function.required
        assert (function.shape is None) <= (stub.kwarg is not None)
        assert (function.returned is None) == (found[path].returns is None)
        if not isinstance(function.tool, HostedTool):
            assert words(ast.get_docstring(found[path])) == words(function.tool.description)


@given(st.dictionaries(KEYS, SCHEMAS, max_size=4), st.lists(KEYS, max_size=2))
def test_a_call_that_fits_the_signature_has_the_names_of_the_schema(
    properties: dict[str, Any], required: list[str]
) -> None:
    tool = FunctionTool("f", parameters={"type": "object", "properties": properties, "required": required})
    ((path, stub),) = declared(stubs(described(Toolset(in_programs=(tool,)))))
    function = Names([tool]).by_path[path]
    keys = [function.parameters[each.arg] for each in stub.args.args]
    assert sorted(keys) == sorted({*properties, *required})
    assert set(keys[: len(keys) - len(stub.args.defaults)]) == set(required)


def record(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


TYPES_OF: dict[str, tuple[Any, str]] = {
    "text": (STRING, "str"),
    "whole numbers": ({"type": "integer"}, "int"),
    "numbers": ({"type": "number"}, "float"),
    "several types": ({"type": ["integer", "null"]}, "int | None"),
    "an enum": ({"enum": ["a", 'b"', 1, True, None]}, r'Literal["a", "b\"", 1, True] | None'),
    "a constant": ({"const": "\n\u2028"}, r"Literal['\n\u2028']"),
    "a constant object": ({"const": {"a": 1}}, "dict"),
    "a constant list": ({"const": [1]}, "list"),
    "a list": ({"type": "array", "items": {"type": ["string", "null"]}}, "list[str | None]"),
    "a list of anything": ({"type": "array"}, "list"),
    "an object": (record("a", a=STRING, b={"type": "integer"}), '{"a": str, "b": NotRequired[int]}'),
    "any object": ({"type": "object"}, "dict"),
    "a mapping": ({"type": "object", "additionalProperties": STRING}, "dict[str, str]"),
    "an object with others": (
        {**record("a", a=STRING), "additionalProperties": {"type": "integer"}},
        '{"a": str, str: int}',
    ),
    "one of two": ({"anyOf": [record("a", a=STRING), {"type": "null"}]}, '{"a": str} | None'),
    "the same twice": ({"anyOf": [STRING, {**STRING, "minLength": 1}]}, "str"),
    "anything among others": ({"anyOf": [STRING, {}]}, "Any"),
    "all of two": ({"allOf": [record("a", a=STRING), record(b=STRING)]}, '{"a": str, "b": NotRequired[str]}'),
    "all of a list and a text": ({"allOf": [{"enum": ["x"]}, {"type": "array", "items": STRING}]}, 'Literal["x"]'),
    "nothing known": ({}, "Any"),
    "nothing possible": (False, "Never"),
    "no number": ({"const": float("nan")}, "Any"),
    "itself": ({"type": "array", "items": {"$ref": "#"}}, "list[Any]"),
}


@pytest.mark.parametrize(("schema", "expected"), TYPES_OF.values(), ids=TYPES_OF)
def test_a_schema_is_read_as_a_type(schema: Any, expected: str) -> None:
    assert python_type(read(schema, Inlining())) == expected


def test_types_are_cut_below_some_levels() -> None:
    schema: Any = STRING
    for _ in range(100):
        schema = record("a", a={"type": "array", "items": schema})
    text = python_type(read(schema, Inlining()))
    assert text.count("list") + text.count('"a"') + text.count("dict") == MOST_LEVELS + 1


@pytest.mark.slow
def test_references_that_double_are_not_followed_forever() -> None:
    definitions = {f"d{n}": record(a={"$ref": f"#/$defs/d{n + 1}"}, b={"$ref": f"#/$defs/d{n + 1}"}) for n in range(40)}
    schema = {**record("x", x={"$ref": "#/$defs/d0"}), "$defs": definitions}
    tools = Toolset(in_programs=tuple(FunctionTool(f"f{n}", parameters=schema) for n in range(20)))
    assert len(described(tools)) < 2 * MOST_PROMPT_INLINE_CHARACTERS
    assert stubs(described(tools)).body


def test_notes_are_comments() -> None:
    order = record(
        "sku", sku=STRING | {"description": "The product,\nby its code."}, count={"type": "integer", "default": 1}
    )
    parameters = record(
        "lines",
        lines={"type": "array", "items": order, "description": "What is ordered."},
        speed={"enum": ["slow", "fast"], "default": "slow", "examples": ["fast"]},
        note={"type": ["string", "null"], "default": None},
    )
    result = record("id", id=STRING | {"description": "That of the order."})
    tool = FunctionTool("order", 'Orders "it".\n\nReturns \\d.', parameters, output_schema=result)
    assert (
        described(Toolset(in_programs=(tool,))).removeprefix(RULES).strip()
        == dedent(r'''
        async def order(
            lines: list[{  # What is ordered.
                "sku": str,  # The product, by its code.
                "count": NotRequired[int],  # Default: 1.
            }],
            speed: Literal["slow", "fast"] = "slow",  # Such as "fast".
            note: str | None = None,
        ) -> {
            "id": str,  # That of the order.
        }:
            """Orders "it".

            Returns \\d."""
    ''').strip()
    )


def test_the_grammar_of_a_text_is_in_the_docstring() -> None:
    tool = CustomTool("on", "Sets a date.", Grammar("regex", r"\d{4}"))
    ((_, stub),) = declared(stubs(described(Toolset(in_programs=(tool,)))))
    assert ast.get_docstring(stub) == "Sets a date.\n\nText that matches this regular expression:\n\\d{4}"
    assert ast.unparse(stub.args) == "input: str"


def test_objects_come_after_functions() -> None:
    tools: tuple[Tool, ...] = (
        FunctionTool("find", namespace="crm"),
        HostedTool("python", "python"),
        FunctionTool("ping"),
        McpTool("my docs", "search", "Searches."),
    )
    text = described(Toolset(in_programs=tools, descriptions={"crm": "The customers.", "python": "Code."}))
    assert (
        text.removeprefix(RULES).strip()
        == dedent('''
        async def ping(): ...

        # Methods of objects that are there already, called as `await crm.find(...)`:

        class crm:
            """The customers."""
            async def find(): ...

        class code_interpreter:
            """Code."""
            async def python(
                code: str,  # Python code to run.
            ): ...

        class my_docs:
            async def search():
                """Searches."""
    ''').strip()
    )


def test_a_request_without_functions_has_rules() -> None:
    assert described(Toolset()) == RULES
