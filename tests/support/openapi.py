"""The OpenAPI document of a server, and values drawn from its JSON schemas."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
from hypothesis import strategies as st

Schema = dict[str, Any]


def in_responses_names(body: bytes) -> bytes:
    """Rename the events of an Open Responses stream to those of the Responses API."""
    assert b"response.reasoning_text" not in body
    return body.replace(b"response.reasoning.", b"response.reasoning_text.")


class Description:
    """The document of ``/openapi.json``."""

    def __init__(self, document: Schema) -> None:
        self.document = document
        self._components = {"components": document["components"]}

    @property
    def operations(self) -> Iterator[tuple[str, str, Schema]]:
        for path, operations in self.document["paths"].items():
            for method, operation in operations.items():
                yield method.upper(), path, operation

    def operation(self, method: str, path: str) -> Schema:
        operation: Schema = self.document["paths"][path][method.lower()]
        return operation

    def resolved(self, schema: Schema) -> Schema:
        """Return the schema that a reference points to; return any other schema unchanged."""
        while "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    def check(self, value: Any, schema: Schema) -> None:
        jsonschema.Draft202012Validator(self._components | schema).validate(value)


Values = st.SearchStrategy[Any]

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, 16, 10**30, -(2**63), 2**63, 1e308, float("nan"), float("inf")),
    *("", " ", "\x00", "\ud800", "\U0001f600", "<|end|>", "user", "x" * 1000, "../..", "%s%n", "٣"),
    *([], [[]], [None], {}, {"": None}, {"type": None}, {"type": "function"}, [{"type": "message"}], {"$ref": "#"}),
]
"""Values that fit few schemas."""

_texts = st.one_of(st.text(max_size=20), st.sampled_from([text for text in ODD if isinstance(text, str)]))
_anything = st.one_of(st.sampled_from(ODD), _texts, st.integers(), st.dictionaries(_texts, _texts, max_size=2))


def valid_values(description: Description, schema: Schema) -> Values:
    schema = description.resolved(schema)
    if choices := schema.get("anyOf", schema.get("oneOf")):
        return st.one_of(*(_deferred_values(description, each) for each in choices))
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "object":
            return _objects(description, schema)
        case "array":
            items = _deferred_values(description, schema.get("items", {}))
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=min(3, schema.get("maxItems", 3)))
        case kind:
            return _SCALARS[kind](schema) if kind in _SCALARS else _anything


def _deferred_values(description: Description, schema: Schema) -> Values:
    return st.deferred(lambda: valid_values(description, schema))


def _objects(description: Description, schema: Schema) -> Values:
    """Draw objects with all required properties and a few optional ones."""
    properties = schema.get("properties", {})
    if not properties:
        return st.dictionaries(_texts, _anything, max_size=2)
    needed = set(schema.get("required", ()))
    if "input" in properties:
        needed.add("input")  # without one there is little to see
    extra = st.sets(st.sampled_from(sorted(properties)), max_size=4)
    values = {name: _deferred_values(description, each) for name, each in properties.items()}
    return extra.flatmap(lambda names: st.fixed_dictionaries({name: values[name] for name in sorted(needed | names)}))


def _numbers(schema: Schema) -> Values:
    least, most = schema.get("minimum", schema.get("exclusiveMinimum", -100)), schema.get("maximum", 1000)
    return st.floats(least, most, exclude_min="exclusiveMinimum" in schema)


def _strings(schema: Schema) -> Values:
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True)
    texts = st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 20), 20))
    return texts if "minLength" in schema or "maxLength" in schema else _texts


_SCALARS: dict[str, Any] = {
    "null": lambda schema: st.none(),
    "boolean": lambda schema: st.booleans(),
    "integer": lambda schema: st.integers(schema.get("minimum"), schema.get("maximum")),
    "number": _numbers,
    "string": _strings,
}


@st.composite
def broken_values(draw: st.DrawFn, values: Values) -> Any:
    value = {"value": copy.deepcopy(draw(values))}
    holder, key = draw(st.sampled_from([*_places(value)]))
    match draw(st.sampled_from(["replace", "remove", "add", "nest"])):
        case "remove" if holder is not value:
            del holder[key]
        case "add" if isinstance(holder, dict) and holder is not value:
            holder[draw(_texts)] = draw(_anything)
        case "nest":
            holder[key] = draw(st.sampled_from([[holder[key]], {"type": holder[key]}, {key: holder[key]}]))
        case _:
            holder[key] = draw(_anything)
    return value["value"]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every object and list in a value, with each of its keys or indices."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


@st.composite
def any_body(draw: st.DrawFn, values: Values) -> bytes:
    """Draw request bodies: most are JSON, many are invalid, some are not JSON."""
    body = json.dumps(draw(st.one_of(values, broken_values(values), broken_values(broken_values(values))))).encode()
    if draw(st.integers(0, 9)):
        return body
    cut, put = draw(st.integers(0, len(body))), draw(st.sampled_from([b"", b"\xff", b"\x00", b"{", b"]" * 99, b"NaN"]))
    return body[:cut] + put + draw(st.sampled_from([b"", body[cut:]]))


def query_values(schema: Schema) -> Values:
    plain = valid_values(Description({"components": {"schemas": {}}, "paths": {}}), schema)
    return st.one_of(plain, _anything).map(_query_text)


def _query_text(value: Any) -> str:
    if isinstance(value, list):
        return str(value[0]) if value else ""
    return str(value).lower() if isinstance(value, bool) else str(value)
