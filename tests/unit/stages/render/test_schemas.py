"""The part of a schema that can be enforced, and schemas that no text fits, against jsonschema and llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher

from penstock.pipeline.errors import InvalidRequest
from penstock.stages.render.constraint import Unenforceable, answer, json_body, lenient_schema
from penstock.stages.render.schemas import fits_some_text, parts_of
from tests.support.examples import examples

LEAVES = st.sampled_from(
    [
        *({"type": "string", "pattern": "^(?!a)"}, {"type": "string", "pattern": "^a+$"}, {"type": "integer"}),
        *({"pattern": r"(a)\1", "minLength": 1}, {"not": {"const": 1}}, {"const": 1}, {"type": "string"}, {}, True),
        *({"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}, {"$ref": "#"}, {"type": "null"}),
    ]
)


def _wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "ab"])
    fields = st.dictionaries(names, inner, max_size=2)
    patterns = st.dictionaries(st.sampled_from(["^(?=a)", "^a", "b$"]), inner, max_size=2)
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object")},
            optional={
                "properties": fields,
                "required": st.lists(names, max_size=2, unique=True),
                "additionalProperties": st.just(False) | inner,
                "patternProperties": patterns,
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner},
            optional={"minItems": st.integers(0, 2), "prefixItems": st.lists(inner, min_size=1, max_size=2)},
        ),
        st.dictionaries(st.sampled_from(["anyOf", "allOf"]), st.lists(inner, min_size=1, max_size=2), min_size=1),
    )


SCHEMAS = st.recursive(LEAVES, _wider, max_leaves=5)
WHOLE = st.builds(
    lambda root, one, two: {**(root if isinstance(root, dict) else {}), "$defs": {"one": one, "two": two}},
    SCHEMAS,
    SCHEMAS,
    SCHEMAS,
)
VALUES = st.recursive(
    st.sampled_from(["", "a", "aa", "ba", 1, 1.5, None, True]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b", "ab"]), inner, max_size=2),
    max_leaves=4,
)


def is_valid(schema: Any, value: Any) -> bool | None:
    """Return if the value fits; None if references go in a circle, which jsonschema does not notice."""
    try:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(value))
    except RecursionError:
        return None


@given(WHOLE, st.lists(VALUES, min_size=1, max_size=5))
@examples(150)
@example({"patternProperties": {"^(?=a)": {}}, "additionalProperties": False}, [{"a": 1}])
def test_enforceable_part_accepts_what_the_schema_accepts(schema: Any, values: list[Any]) -> None:
    try:
        part = lenient_schema(schema)
    except Unenforceable:
        assert not any(is_valid(schema, value) for value in values)
        return
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(part)))
    for value in values:
        if is_valid(schema, value):
            assert is_valid(part, value) in (True, None)


def unrolled(schema: Any, root: Any, depth: int) -> Any:
    """The schema with its references replaced by their targets, and by False beyond ``depth`` of them."""
    match schema:
        case {"$ref": str(reference), **others}:
            name = reference.removeprefix("#/$defs/")
            target = root if reference == "#" else root["$defs"][name]
            inner = unrolled(target, root, depth - 1) if depth else False
            return {"allOf": [inner, unrolled(others, root, depth)]}
        case dict():
            return {key: unrolled(value, root, depth) for key, value in schema.items() if key != "$defs"}
        case list():
            return [unrolled(value, root, depth) for value in schema]
        case _:
            return schema


@given(WHOLE)
@examples(150)
@example({"$defs": {"one": {"$ref": "#/$defs/two"}, "two": {"$ref": "#/$defs/one"}}, "$ref": "#/$defs/one"})
@example({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "$defs": {}})
@example({"anyOf": [{"type": "null"}, {"type": "array", "minItems": 1, "items": {"$ref": "#"}}], "$defs": {}})
def test_schema_without_end_fits_no_text_however_far_it_is_unrolled(schema: Any) -> None:
    if fits_some_text(schema):
        return
    flat = unrolled(schema, schema, 4) | {"x-guidance": {"lenient": True}}
    problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(flat)))
    assert "Unsatisfiable" in problem or "regex" in problem or "backref" in problem


# Data in schemas

KEYWORDS: Any = {
    "minItems": 99_999,
    "maxItems": 1e300,
    "pattern": "a{99999}",
    "patternProperties": {"b{99999}": {}},
    "$ref": "#/nowhere",
    "$id": "elsewhere",
    "type": "nothing",
}
"""What ends or changes the check of a schema, if it is a keyword."""

_datum = st.recursive(
    st.fixed_dictionaries({}, optional={key: st.just(value) for key, value in KEYWORDS.items()}),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), inner, max_size=3),
    max_leaves=4,
)
_place: st.SearchStrategy[Any] = st.sampled_from(["default", "const", "enum", "examples"])
_BODY: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def _with_data(place: str, datum: Any) -> Any:
    value = [datum] if place in ("enum", "examples") else datum
    if place in ("default", "examples"):
        return {**_BODY, place: value}
    return {**_BODY, "properties": {**_BODY["properties"], "data": {place: value}}}


@examples(100)
@given(_place, _datum)
@example("default", {"maxItems": 99_999})
@example("const", {"pattern": "a{99999}"})
@example("enum", {"$ref": "#/properties/data"})
def test_data_in_a_schema_never_changes_the_verdict(place: str, datum: Any) -> None:
    schema = _with_data(place, datum)
    assert json_body(schema)
    assert answer({"type": "json_schema", "schema": schema, "strict": True}, {}) is not None
    assert len(parts_of(schema)) == len(parts_of(_with_data(place, 0)))


def test_names_of_properties_are_no_keywords() -> None:
    named = {name: {"type": "string"} for name in KEYWORDS}
    assert json_body({"type": "object", "properties": named, "required": [*KEYWORDS]})


@pytest.mark.parametrize("bounds", [{"minItems": 99_999}, {"maxItems": 10**400}, {"pattern": "a{99999}"}])
@pytest.mark.parametrize(
    "within",
    [
        lambda inner: inner,
        lambda inner: {"properties": {"default": inner}},
        lambda inner: {"items": {"anyOf": [inner]}},
        lambda inner: {"additionalProperties": inner},
        lambda inner: {"properties": {"a": {"$ref": "#/default"}}, "default": inner},
        lambda inner: {"properties": {"a": {"$ref": "#/x/1"}}, "x": [0, inner]},
        lambda inner: {"$defs": {"a": {"prefixItems": [inner]}}},
        lambda inner: {"properties": {"a": {"$ref": "#anchored"}}, "x": [[inner]]},
    ],
)
def test_each_part_of_a_schema_is_bounded(bounds: Any, within: Callable[[Any], Any]) -> None:
    with pytest.raises(Unenforceable, match="are the most"):
        json_body(within(bounds))
    with pytest.raises(InvalidRequest):
        answer({"type": "json_schema", "schema": within(bounds), "strict": True}, {})


def test_parts_of_a_schema_that_refers_to_itself_are_few() -> None:
    schema: Any = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"items": {"$ref": "#"}}}, "$ref": "#/$defs/a"}
    assert len(parts_of(schema)) == 4
