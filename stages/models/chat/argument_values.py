"""The arguments of a call by the schema of its function: which types they have, and their text as JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from penstock.stages.models.chat.json_value import to_json

_OF_PYTHON: Mapping[type, str] = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}
_AFTER_ZEROS = re.compile(r"-?0+[1-9]\d{0,99}")
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_OTHER_NAMES = {
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("float", "double"), "number"),
    **dict.fromkeys(("int", "long"), "integer"),
    **dict.fromkeys(("list", "tuple"), "array"),
    "bool": "boolean",
    "dict": "object",
}
"""The names that clients give to types, which are those of Python and others, with JSON Schema's."""

_MOST_STEPS = 256
"""References and alternatives that are followed in one schema."""


class ArgumentSchema:
    """The schema of a value, with local references and alternatives resolved; an empty one allows any value."""

    def __init__(self, schema: object = None, root: Mapping[str, Any] | None = None) -> None:
        self._root = root if root is not None else schema if isinstance(schema, dict) else {}
        self._parts = tuple(self._resolved(schema))
        self.types = self._types()
        """The names of the types that a value may have; empty if the schema names none."""

    @property
    def is_text(self) -> bool:
        """True if the only value is a string."""
        return self.types == {"string"}

    def of_property(self, name: str) -> ArgumentSchema:
        """Return the schema of a property of an object."""
        for part in self._parts:
            properties = part.get("properties")
            if isinstance(properties, dict) and name in properties:
                return ArgumentSchema(properties[name], self._root)
        others = next((part["additionalProperties"] for part in self._parts if "additionalProperties" in part), None)
        return ArgumentSchema(others, self._root)

    @property
    def of_items(self) -> ArgumentSchema:
        """The schema of the items of an array."""
        return ArgumentSchema(next((part["items"] for part in self._parts if "items" in part), None), self._root)

    def has(self, name: str) -> bool:
        """True if the schema names this property."""
        return any(isinstance(known := part.get("properties"), dict) and name in known for part in self._parts)

    def _resolved(self, schema: object) -> Iterator[Mapping[str, Any]]:
        """Yield the schema, those that it refers to, and its alternatives."""
        waiting, seen = [schema], set[int]()
        while waiting and len(seen) < _MOST_STEPS:
            part = waiting.pop(0)
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            yield part
            waiting.append(self._referred(part.get("$ref")))
            for word in ("allOf", "anyOf", "oneOf"):
                if isinstance(parts := part.get(word), list):
                    waiting += parts

    def _referred(self, reference: object) -> object:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: object = self._root
        for step in filter(None, reference[1:].split("/")):
            key = step.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def _types(self) -> frozenset[str]:
        types: set[str] = set()
        for part in self._parts:
            named = part.get("type")
            names = named if isinstance(named, list) else [named]
            types.update(_OTHER_NAMES.get(each, each) for each in names if isinstance(each, str))
            if named is None:
                values = (
                    part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
                )
                types.update(_OF_PYTHON[type(value)] for value in values if type(value) in _OF_PYTHON)
                types.update(kind for kind, word in (("object", "properties"), ("array", "items")) if word in part)
            if part.get("nullable") is True:
                types.add("null")
        return frozenset(types)

    def allows(self, value: object) -> bool:
        """True if the type of a value is one that the schema names."""
        kind = _OF_PYTHON.get(type(value))
        is_whole = isinstance(value, float) and value.is_integer()
        return (
            kind in self.types
            or (kind == "integer" and "number" in self.types)
            or (is_whole and "integer" in self.types)
        )


def as_json(text: str, schema: ArgumentSchema) -> str:
    """Return a value that the model wrote as text as JSON.

    It is a string if the schema says so, or if no other type of the schema fits.  Without types, what is JSON is kept.
    """
    if schema.is_text:
        return quoted(text)
    stripped = text.strip()
    value = _loaded(stripped)
    if value is not _NO_JSON and (schema.allows(value) if schema.types else not isinstance(value, str)):
        return quoted(text) if isinstance(value, str) and "string" in schema.types else stripped
    if schema.types:
        for other in _other_readings(stripped):
            if schema.allows(other) and not isinstance(other, str):
                return to_json(other)
    return quoted(text)


def quoted(text: str) -> str:
    """Return ``text`` as a JSON string."""
    return to_json(text)


_NO_JSON = object()


def _loaded(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):  # also an integer of more digits than Python reads, and deep nesting
        return _NO_JSON


def _refused(constant: str) -> NoReturn:
    raise ValueError(constant)


def _other_readings(text: str) -> Iterator[object]:
    """Yield what the text may mean besides JSON: a word in capitals, a number after zeros, or a Python literal."""
    if text.lower() in _WORDS:
        yield _WORDS[text.lower()]
    if _AFTER_ZEROS.fullmatch(text):
        yield int(text)
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (
        ValueError,
        TypeError,
        SyntaxError,
        RecursionError,
        MemoryError,
    ):  # a set, or deep nesting
        return
    yield list(value) if isinstance(value, tuple) else value
