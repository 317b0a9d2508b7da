"""Arguments by their schema: jsonschema is the measure, and neither schema nor arguments take long."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from penstock.extensions.programs.arguments import Checks, WrongArguments, parsed


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
        | dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), SIZES)
        | {"pattern": st.sampled_from(["^a", "b$", "^$", "[ab]+"])},
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


def test_patterns_count() -> None:
    schema = {"anyOf": [{"properties": {"a": {"pattern": f"{number}b"}}} for number in range(100)]}
    with pytest.raises(WrongArguments, match="take too long"):
        check('{"a": "c"}', schema)


def test_pattern_takes_linear_time() -> None:
    with pytest.raises(WrongArguments, match="a does not match"):
        check(json.dumps({"a": "a" * 100_000 + "!"}), {"properties": {"a": {"pattern": "^(a+)+$"}}})


@pytest.mark.parametrize("pattern", ["(?=a)b", "(a)\\1", "(", "a" * 5_000])
def test_pattern_that_the_machine_does_not_know_is_not_checked(pattern: str) -> None:
    check('{"a": "c"}', {"properties": {"a": {"pattern": pattern}}})
