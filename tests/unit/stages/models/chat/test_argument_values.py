"""Arguments by the schemas of functions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.models.chat.argument_values import ArgumentSchema, as_json

PERIOD = {
    "$ref": "#/$defs/Period",
    "$defs": {"Period": {"anyOf": [{"$ref": "#/$defs/Period"}, {"type": "object"}, {"type": "null"}]}},
}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("3.5", {"type": "float"}, 3.5),
        ("3.5", {"type": "integer"}, "3.5"),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["string", "null"]}, None),
        ("{'a': 1}", {"type": "object"}, {"a": 1}),
        ('{"kind": "week"}', PERIOD, {"kind": "week"}),
        ("null", PERIOD, None),
        ("week", PERIOD, "week"),
        ("2", {"enum": [1, 2]}, 2),
        ("007", {"type": "integer"}, 7),
        ("NaN", {"type": "number"}, "NaN"),
        ("[1]", None, [1]),
        ('"a"', None, '"a"'),
        ("123456789012345678901234567890", {"type": "integer"}, 123456789012345678901234567890),
        (" a ", {"type": "string"}, " a "),
        (r"['\ud83d', '\ud83d\ude00']", {"type": "array"}, ["\ud83d", "\U0001f600"]),
    ],
)
def test_values_have_the_types_of_their_schema(text: str, schema: Any, value: object) -> None:
    assert json.loads(as_json(text, ArgumentSchema(schema)).encode()) == value


@given(
    st.text(),
    st.recursive(
        st.none() | st.text() | st.sampled_from(["string", "$ref"]),
        lambda inner: st.dictionaries(
            st.sampled_from(["type", "$ref", "anyOf", "allOf", "enum", "const", "properties", "items"]),
            inner | st.lists(inner),
        ),
    ),
)
def test_any_text_by_any_schema_is_json(text: str, schema: Any) -> None:
    json.loads(as_json(text, ArgumentSchema(schema)))
