"""Function tools as TypeScript, compared with openai_harmony as far as that is correct."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.harmony import function, our_section, reference_section

STRING = {"type": "string"}
NUMBER = {"type": "number"}


def record(properties: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


def defaulted(*values: Any) -> dict[str, Any]:
    return record({f"a{position}": {"default": value} for position, value in enumerate(values)})


SAME: dict[str, Any] = {
    "no arguments": None,
    "anything": {},
    "an object": {"type": "object"},
    "no properties": record({}),
    "an unknown type": {"type": "date"},
    "keywords": record(
        {name: {"type": name} for name in ("string", "number", "integer", "boolean", "array", "object")}
    ),
    "required": record({"a": STRING, "b": NUMBER}, required=["b", "c"]),
    "additional properties": record({"a": STRING}, additionalProperties=False, required=[]),
    "what has no words": record({"a": {**STRING, "pattern": "^x", "maxLength": 3}, "b": {**NUMBER, "minimum": 0}}),
    "order": record({"z": STRING, "a": STRING, "m": STRING}),
    "names": record({"snake_case": STRING, "camelCase": STRING, "_a1": STRING, "größe": STRING}),
    "descriptions": record(
        {"a": {**STRING, "description": "An a."}, "b": {**NUMBER, "description": ""}}, description="All."
    ),
    "titles": record({"a": {**STRING, "title": "A", "description": "An a."}, "b": {"title": "B"}}, title="Ignored"),
    "examples": record({"a": {**STRING, "examples": ["x", "y z"]}, "b": {**STRING, "examples": []}}),
    "enum": record({"a": {**STRING, "enum": ["x", "y"]}, "b": {**STRING, "enum": ["x"]}, "c": {**STRING, "enum": []}}),
    "enum of strings with others": record({"a": {**STRING, "enum": ["x", None, 1]}}),
    "default": record({"a": {**STRING, "default": "x"}, "b": {**STRING, "enum": ["x"], "default": "x"}}),
    "defaults": defaulted(None, True, 0, [1, {"k": None}], {}),
    "numbers": defaulted(1.0, 0.1, 1e-5, 1.5e-5, 1e-7, 1e16, -0.0),
    "nullable": record({"a": {**STRING, "nullable": True}, "b": {**STRING, "enum": ["x"], "nullable": True}}),
    "nullable anything": record({"a": {"nullable": True}, "b": {**STRING, "nullable": False}}),
    "several types": record({"a": {"type": ["string", "integer", "null"]}, "b": {"type": ["object"]}}),
    "arrays": record({"a": {"type": "array", "items": {"type": "array", "items": STRING}}, "b": {"type": "array"}}),
    "arrays of anything": record({"a": {"type": "array", "items": {}}, "b": {"type": "array", "items": True}}),
    "nested objects": record({"a": record({"b": record({"c": STRING}, required=["c"])}, description="An a.")}),
    "arrays of objects": record({"a": {"type": "array", "items": record({"b": STRING}, description="A b.")}}),
    "oneOf": record({"a": {"oneOf": [STRING, NUMBER]}, "b": {"oneOf": [STRING]}}, required=["a"]),
    "oneOf, described": record({"a": {"oneOf": [{**STRING, "description": "s"}, {**NUMBER, "description": "n"}]}}),
    "oneOf, described twice": record(
        {"a": {"oneOf": [{**STRING, "description": "s"}, {**NUMBER, "description": "n"}], "description": "all"}}
    ),
    "oneOf, described alike": record(
        {"a": {"oneOf": [{**STRING, "description": "all"}, {**NUMBER, "description": "all"}], "description": "all"}}
    ),
    "oneOf with defaults": record(
        {
            "a": {
                "oneOf": [{**STRING, "enum": ["x"], "default": "x"}, {**STRING, "default": "x"}, {"default": 1}],
                "title": "A",
                "examples": ["x"],
                "default": "x",
            }
        }
    ),
    "oneOf of objects": record({"a": {"oneOf": [record({"b": STRING}, description="A b."), record({"c": NUMBER})]}}),
    "oneOf in oneOf": record({"a": {"oneOf": [{"oneOf": [STRING, NUMBER]}, {"type": "boolean", "nullable": True}]}}),
    "oneOf at the top": {
        "oneOf": [{**STRING, "enum": ["x"], "default": "x", "description": "s"}, record({"a": STRING})]
    },
}


@pytest.mark.parametrize("schema", SAME.values(), ids=SAME)
def test_schema_reads_as_in_openai_harmony(schema: Any) -> None:
    tools = [function("f", schema, "Does it.")]
    assert our_section(*tools) == reference_section(tools)


@pytest.mark.parametrize("description", [None, "", "One line.", "Two\nlines.", "A\n\nblank.\n", "\n", "\r\na\r\n"])
def test_function_is_described_as_in_openai_harmony(description: str | None) -> None:
    tools = [function("get_it", None, description), function("other-name", record({}), description)]
    assert our_section(*tools) == reference_section(tools)


# Any schema of a client

WORDS = st.text("abc xyzäß世.,'/*()[]{}", max_size=8)
NAMES = st.from_regex(r"[a-z_][a-zA-Z0-9_]{0,5}", fullmatch=True)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.integers(-(10**6), 10**6).map(lambda n: n / 1000)
)
DEFAULTS = SCALARS | WORDS | st.lists(SCALARS, max_size=2) | st.dictionaries(NAMES, SCALARS, max_size=2)
NOTES = st.fixed_dictionaries(
    {}, optional={"title": WORDS, "description": WORDS, "examples": st.lists(WORDS, max_size=2), "default": DEFAULTS}
)
KEYWORDS = st.sampled_from(["string", "number", "integer", "boolean"])
LEAVES = st.one_of(
    st.just({}),
    st.builds(lambda name: {"type": name}, KEYWORDS),
    st.builds(lambda name: {"type": name, "nullable": True}, KEYWORDS),
    st.builds(lambda names: {"type": names}, st.lists(KEYWORDS | st.just("null"), min_size=1, max_size=3)),
    st.builds(lambda values: {"type": "string", "enum": values}, st.lists(WORDS, max_size=3)),
)


def annotated(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(lambda schema, notes: {**schema, **notes}, schemas, NOTES)


def records(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    required = st.lists(NAMES, max_size=2)
    properties = st.dictionaries(NAMES, schemas, max_size=3)
    return st.builds(lambda properties, required: record(properties, required=required), properties, required)


def bigger(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.builds(lambda name: {"type": name}, KEYWORDS) | annotated(records(schemas))
    return annotated(
        records(schemas)
        | st.builds(lambda items: {"type": "array", "items": items}, items)
        | st.builds(lambda variants: {"oneOf": variants}, st.lists(schemas, min_size=1, max_size=3))
    )


RENDERED_RIGHT = annotated(records(st.recursive(annotated(LEAVES), bigger, max_leaves=6)))


@given(RENDERED_RIGHT)
def test_any_correct_schema_reads_as_in_openai_harmony(schema: Any) -> None:
    tools = [function("f", schema)]
    assert our_section(*tools) == reference_section(tools)


JSON = st.recursive(
    SCALARS | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
REFERENCES = st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/anyOf/0", "#/nowhere", "#a", "x#/y"])
TYPES = st.sampled_from(["string", "integer", "null", "object", "array", "date"])


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, max_size=3)
    known: dict[Any, st.SearchStrategy[Any]] = {
        "type": TYPES | st.lists(TYPES, max_size=3),
        "properties": st.dictionaries(st.sampled_from(["a", "b-c", '"', "\n"]), inner, max_size=3),
        "items": inner,
        **dict.fromkeys(("oneOf", "anyOf", "allOf"), several),
        **dict.fromkeys(("enum", "examples", "required"), st.lists(JSON, max_size=3)),
        **dict.fromkeys(("const", "default"), JSON),
        **dict.fromkeys(("title", "description"), st.text("a{(\"'/*\n\r\u2028\\", max_size=8)),
        "additionalProperties": inner,
        "$defs": st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
        "$ref": REFERENCES,
        "nullable": st.booleans(),
    }
    mixed = {key: st.one_of(right, right, right, JSON) for key, right in known.items()}
    return st.lists(st.sampled_from(sorted(mixed)), max_size=4, unique=True).flatmap(
        lambda keys: st.fixed_dictionaries({key: mixed[key] for key in keys})
    )


ANYTHING = st.recursive(st.booleans() | JSON, keywords, max_leaves=8)

_NO_CODE = re.compile(r'"(?:\\.|[^"\\\n])*"|//.*|/\*.*?\*/')


def unbalanced(text: str) -> str:
    """The brackets of the code in ``text`` that have no counterpart."""
    brackets = "".join(character for character in _NO_CODE.sub("", text) if character in "(){}[]")
    while (shorter := re.sub(r"\(\)|\{\}|\[\]", "", brackets)) != brackets:
        brackets = shorter
    return brackets


@given(keywords(ANYTHING) | ANYTHING)
def test_no_schema_breaks_the_namespace(schema: Any) -> None:
    declared = our_section(function("f", schema), function("g"))
    code = _NO_CODE.sub("", declared)
    assert declared.endswith("type g = () => any;\n\n} // namespace functions")
    assert code.count("=> any;") == 2
    assert not unbalanced(declared)
    assert not {'"', "\\"} & set(code)


def test_bracket_check_ignores_strings_and_comments() -> None:
    assert unbalanced('{ "}": ([)]') == "{([)]"
    assert not unbalanced('{ "{": [any /* ( */] } // (')
