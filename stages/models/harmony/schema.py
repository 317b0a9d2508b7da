"""Reading JSON schemas as shapes: types that TypeScript can express.

Equivalent schemas give the same shape: references are followed, ``allOf`` is merged, ``const`` and ``enum`` become
literals, ``anyOf`` is read as ``oneOf``.  Constraints without a TypeScript type (lengths, patterns, ranges) are left
out.  Invalid parts become `ANY`: clients send all sorts of schemas, and none of them should fail a request.  Depth and
the expansion of references are limited, because a small schema can describe an endless type.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from penstock.stages.models.harmony import shapes

MOST_LEVELS = 32
"""Limit on nested schemas; deeper ones are `ANY`."""

MOST_INLINE_CHARACTERS = 200_000
"""Limit on the JSON that references add to one schema, in characters; further references are not followed."""

MOST_PROMPT_INLINE_CHARACTERS = 1_000_000
"""The same limit for all schemas of one prompt; reading that much takes some seconds."""

_MOST_LITERAL_LEVELS = 100
"""Levels of a literal; deeper values are null."""

_json = json.JSONEncoder(ensure_ascii=False, default=str).encode

_KEYWORDS: Mapping[str, shapes.Word] = {
    "string": shapes.STRING,
    "number": shapes.NUMBER,
    "integer": shapes.INTEGER,
    "boolean": shapes.BOOLEAN,
    "null": shapes.NULL,
    "object": shapes.OBJECT,
    "array": shapes.ANY_ARRAY,
}


class Inlining:
    """The JSON that references may still add to the schemas of one prompt, in characters."""

    def __init__(self) -> None:
        self.left = MOST_PROMPT_INLINE_CHARACTERS


def read(schema: Any, inlining: Inlining) -> shapes.Node:
    """Read a schema.  Never fails: a value that is not a schema gives `ANY`."""
    return _Reader(schema, inlining).read(schema)


class _Reader:
    def __init__(self, root: Any, inlining: Inlining) -> None:
        self._root = root
        self._following = ["#"]
        self._inlining = inlining
        self._left = min(MOST_INLINE_CHARACTERS, inlining.left)
        self._depth = 0

    def read(self, schema: Any) -> shapes.Node:
        if schema is False:
            return shapes.Node(shapes.NEVER)
        if not isinstance(schema, dict) or self._depth >= MOST_LEVELS:
            return shapes.Node(shapes.ANY)
        self._depth += 1
        node = self._combined(schema)
        self._depth -= 1
        return node

    def _combined(self, schema: dict[str, Any]) -> shapes.Node:
        """Intersect the schema's own keywords with its references, ``allOf`` and unions."""
        embedded = [*self._referenced(schema), *(self.read(part) for part in _list(schema, "allOf"))]
        unions = [
            shapes.Union(tuple(self.read(variant) for variant in _list(schema, key)))
            for key in ("oneOf", "anyOf")
            if _list(schema, key)
        ]
        shape = shapes.intersection([self._own(schema), *(node.shape for node in embedded), *unions])
        if schema.get("nullable") is True:
            shape = shapes.or_null(shape)
        return shapes.Node(shape, _notes(schema, embedded[0].notes if len(embedded) == 1 else shapes.Notes()))

    # References

    def _referenced(self, schema: dict[str, Any]) -> Iterator[shapes.Node]:
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return
        if reference in self._following:
            yield shapes.Node(_recursion(reference))
            return
        target = _lookup(self._root, reference)
        if self._left >= 0:
            length = len(literal(target))
            self._left -= length
            self._inlining.left -= length
        if self._left >= 0:
            self._following.append(reference)
            yield self.read(target)
            self._following.pop()

    # The schema's own keywords

    def _own(self, schema: dict[str, Any]) -> shapes.Shape:
        if "const" in schema:
            return shapes.Word(literal(schema["const"]))
        names = _type_names(schema)
        if values := _enumerated(schema, names):
            return shapes.choice(values)
        in_list = isinstance(schema.get("type"), list)
        return shapes.choice(self._typed(name, schema, in_list=in_list) for name in names)

    def _typed(self, name: str, schema: dict[str, Any], *, in_list: bool) -> shapes.Shape:
        if name == "array" and "items" in schema:
            return shapes.Array(self.read(schema["items"]))
        if name == "object":
            shape = self._object(schema)
            return _KEYWORDS[name] if in_list and shape.is_empty else shape
        return _KEYWORDS[name]

    def _object(self, schema: dict[str, Any]) -> shapes.Object:
        properties = schema.get("properties")
        named = properties.items() if isinstance(properties, dict) else ()
        others = schema.get("additionalProperties")
        index = self.read(others) if isinstance(others, dict) else shapes.Node(shapes.ANY)
        return shapes.Object(
            tuple((name, self.read(value)) for name, value in named),
            frozenset(name for name in _list(schema, "required") if isinstance(name, str)),
            None if index.shape == shapes.ANY else index,
        )


# Keywords


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _type_names(schema: dict[str, Any]) -> list[str]:
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return [name for name in names if isinstance(name, str) and name in _KEYWORDS]
    if any(isinstance(schema.get(key), (dict, list)) for key in ("properties", "required", "additionalProperties")):
        return ["object"]
    return ["array"] if "items" in schema else []


def _enumerated(schema: dict[str, Any], names: list[str]) -> list[shapes.Word]:
    values = _list(schema, "enum")
    if not values or "object" in names or "array" in names:
        return []
    if names == ["string"]:
        return [shapes.Word(literal(value)) for value in values if isinstance(value, str)]
    # strictly, a schema whose `enum` lacks null forbids it, but clients who give it as a type mean to allow it
    null = [shapes.NULL] if "null" in names and None not in values else []
    return [*(shapes.Word(literal(value)) for value in values), *null]


def _notes(schema: dict[str, Any], embedded: shapes.Notes) -> shapes.Notes:
    """Return the schema's own notes, completed by ``embedded``, the notes of the schema that it refers to."""
    return shapes.Notes(
        title=_text(schema, "title") if "title" in schema else embedded.title,
        description=_text(schema, "description") if "description" in schema else embedded.description,
        examples=tuple(literal(value) for value in _list(schema, "examples")) or embedded.examples,
        default=literal(schema["default"]) if "default" in schema else embedded.default,
        of_enum=bool(_list(schema, "enum")) or embedded.of_enum,
    )


def _text(schema: dict[str, Any], key: str) -> str | None:
    value = schema.get(key)
    return value if isinstance(value, str) else None


# References


def _lookup(root: Any, reference: str) -> Any:
    """Resolve a JSON pointer (RFC 6901) into ``root``; an invalid one gives ``True``, the schema of any value."""
    if not reference.startswith("#/"):
        return True
    target = root
    for step in unquote(reference[2:]).split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target.get(key, True)
        elif isinstance(target, list) and key.isdecimal() and len(key) < 10 and int(key) < len(target):
            target = target[int(key)]
        else:
            return True
    return target


def _recursion(reference: str) -> shapes.Word:
    name = reference.rpartition("/")[2]
    return shapes.Word(f"any /* {name} */") if re.fullmatch(r"[\w.-]+", name) else shapes.ANY


# Values


def literal(value: Any, depth: int = 0) -> str:
    """Return a JSON value as text, with numbers in openai_harmony's notation."""
    if depth > _MOST_LITERAL_LEVELS:
        return "null"
    if isinstance(value, dict):
        return "{" + ",".join(f"{literal(str(k))}:{literal(v, depth + 1)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(literal(item, depth + 1) for item in value) + "]"
    if isinstance(value, float) and math.isfinite(value):
        return _number(value)
    return _json(value)


def _number(value: float) -> str:
    text = repr(value)
    return f"{Decimal(text):f}" if text.endswith("e-05") else text.replace("e-0", "e-")
