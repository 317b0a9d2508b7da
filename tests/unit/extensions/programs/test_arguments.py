"""Arguments by their schema: jsonschema is the measure, and neither schema nor arguments take long."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from penstock.extensions.programs.arguments import MOST_STEPS, Checks, WrongArguments, parsed
from tests.support.clock import count_instructions


def check(arguments: str, schema: Any) -> None:
    Checks().check(arguments, schema)


LEAVES = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, 2.5]) | st.sampled_from(["", "a", "ab"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
SIZES = st.integers(0, 3)


def _inner(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(schemas, min_size=1, max_size=2)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True),
            "enum": st.lists(VALUES, min_size=1, max_size=2),
            "properties": st.dictionaries(st.sampled_from("abc"), schemas, max_size=2),
            "required": st.lists(st.sampled_from("abc"), max_size=2, unique=True),
            "additionalProperties": schemas,
            "items": schemas,
            "prefixItems": several,
            "allOf": several,
            "anyOf": several,
            "$ref": st.sampled_from(["#/$defs/one", "#/$defs/two"]),
        }
        | dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), SIZES)
        | dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), SIZES),
    )


LEAF = st.booleans() | st.fixed_dictionaries({}, optional={"type": TYPES, "const": VALUES})
SCHEMAS = st.recursive(LEAF, _inner, max_leaves=5)


@given(_inner(SCHEMAS), LEAF, LEAF, OBJECTS)
def test_what_fits_is_what_the_standard_says(schema: Any, one: Any, two: Any, value: Any) -> None:
    whole = {**schema, "$defs": {"one": one, "two": two}}
    fits = Draft202012Validator(whole).is_valid(value)
    if fits:
        check(json.dumps(value), whole)
    else:
        with pytest.raises(WrongArguments):
            check(json.dumps(value), whole)


@given(st.dictionaries(st.text(), VALUES) | st.fixed_dictionaries({"type": VALUES, "required": VALUES}), OBJECTS)
def test_schema_that_is_none_refuses_at_most(schema: Any, value: Any) -> None:
    with suppress(WrongArguments):
        check(json.dumps(value), schema)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": NaN}', "[" * 5_000, '{"a": "\ud800"}', "{}" * 2])
def test_text_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(WrongArguments, match="the arguments are"):
        check(text, {})


@pytest.mark.parametrize("text", ["[" + "[]," * 20_000 + "[]]", "[" + "1," * 30_000 + "1]"])
def test_json_with_too_many_values_is_not_parsed(text: str) -> None:
    with pytest.raises(WrongArguments, match="too many values"):
        parsed(text)


@pytest.mark.parametrize("keyword", ["anyOf", "allOf"])
def test_alternatives_within_each_other_are_not_all_tried(keyword: str) -> None:
    levels = {str(n): {keyword: [{"$ref": f"#/$defs/{n + 1}"}, {"$ref": f"#/$defs/{n + 1}"}]} for n in range(60)}
    schema = {"$ref": "#/$defs/0", "$defs": {**levels, "60": {"type": "array" if keyword == "anyOf" else "object"}}}
    with pytest.raises(WrongArguments, match="take too long"):
        check("{}", schema)


def test_reference_to_itself_has_an_end() -> None:
    with pytest.raises(WrongArguments, match="nested too deeply"):
        check("{}", {"$ref": "#"})


def test_values_of_an_enum_count() -> None:
    schema = {"additionalProperties": {"enum": [[n] * 100 for n in range(2_000)]}}
    with pytest.raises(WrongArguments, match="take too long"):
        check(json.dumps({"a": [0] * 99}), schema)


def test_calls_of_a_round_share_their_steps() -> None:
    checks, schema = Checks(), {"properties": {"a": {"items": {"type": "integer"}}}}
    checks.check(json.dumps({"a": [1] * 19_000}), schema)
    with pytest.raises(WrongArguments, match="take too long"):
        for _ in range(10):
            checks.check(json.dumps({"a": [1] * 19_000}), schema)


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#/" + "a/" * 500}, {"type": ["string"] * 500}, {"required": ["a"] * 500}, {"enum": [[1]] * 500}],
    ids=["reference", "types", "required", "enum"],
)
def test_no_keyword_takes_more_than_its_steps(schema: Any) -> None:
    def checked() -> None:
        with suppress(WrongArguments):
            check(json.dumps({"a": [{"a": 1}] * 500}), {"properties": {"a": {"items": schema}}})

    assert count_instructions(checked) < 20 * MOST_STEPS


def test_error_names_few_values_of_a_schema() -> None:
    for schema in ({"enum": [[1] * 10_000, *map(str, range(10_000))]}, {"type": ["string"] * 10_000}):
        with pytest.raises(WrongArguments) as raised:
            check('{"a": 1}', {"properties": {"a": schema}})
        assert len(str(raised.value)) < 200


def test_pattern_is_not_checked() -> None:
    check('{"a": "x"}', {"properties": {"a": {"pattern": "^y$"}}})
