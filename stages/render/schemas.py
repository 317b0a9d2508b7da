"""JSON schemas: the parts of one, those that llguidance can enforce, and whether any text fits it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote

Schema: TypeAlias = Mapping[str, Any]

DEFINITIONS = ("$defs", "definitions")

_MOST_CHECKS = 200
"""The most parts of one schema that are checked by themselves; each check takes a millisecond or more."""

_NAMED = ("properties", "patternProperties")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems")
_REST_OF = {"additionalProperties": _NAMED, "items": ("prefixItems",), "additionalItems": ("items",)}
"""The keywords that bind what other keywords leave over: without those, they would bind too much."""

# Parts

_NAMED_PARTS = (*_NAMED, *DEFINITIONS, "dependentSchemas", "dependencies")
_LISTED_PARTS = (*_LISTED, "items")
_SINGLE_PARTS = (
    *(*_SINGLE, "contains", "not", "if", "then", "else", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties", "contentSchema"),
)


def parts_of(schema: Schema) -> list[Schema]:
    """Return a schema with all schemas in it, and those that its references name, each once.

    What other keywords hold is data, such as the values of ``default``, ``const``, ``enum`` and ``examples``.  If a
    reference is none to a place in the schema, its target may be anywhere, so that all objects are taken for schemas.
    """
    known, waiting, found, takes_all = {id(schema)}, [schema], list[Schema](), False
    while waiting:
        part = waiting.pop()
        found.append(part)
        inner = list(_values(part) if takes_all else _parts_within(part))
        if isinstance(reference := part.get("$ref"), str):
            target = referenced(reference, schema)
            if target is None and not takes_all:
                known, waiting, found, takes_all = {id(schema)}, [schema], [], True
                continue
            inner.append(target)
        for each in inner:
            if isinstance(each, Mapping) and id(each) not in known:
                known.add(id(each))
                waiting.append(each)
    return found


def _parts_within(part: Schema) -> Iterator[Any]:
    for key, value in part.items():
        if key in _NAMED_PARTS and isinstance(value, Mapping):
            yield from value.values()
        elif key in _LISTED_PARTS and isinstance(value, list):
            yield from value
        elif key in _SINGLE_PARTS:
            yield value


def _values(part: Schema) -> Iterator[Any]:
    """Yield the objects in an object, also those in its lists."""
    waiting = list(part.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        else:
            yield value


# Parts that can be enforced


class EnforceablePart:
    """Leaves out what cannot be enforced; ``is_fine`` checks a schema by itself."""

    def __init__(self, is_fine: Callable[[Schema], bool]) -> None:
        self._is_fine = is_fine
        self._checks = 0

    def of(self, schema: Schema) -> Schema:
        """Return ``schema`` without what cannot be enforced: it accepts whatever ``schema`` accepts."""
        try:
            return self._of_whole(schema)
        except RecursionError:  # a client's schema may nest more deeply than Python calls
            return {}

    def _of_whole(self, schema: Schema) -> Schema:
        if self._fits(schema):
            return schema
        definitions = {key: schema[key] for key in DEFINITIONS if isinstance(schema.get(key), Mapping)}
        any_value = {key: {name: dict[str, Any]() for name in named} for key, named in definitions.items()}
        kept = {
            key: {name: self._part(inner, any_value) for name, inner in named.items()}
            for key, named in definitions.items()
        }
        rest = {key: value for key, value in schema.items() if key not in definitions}
        whole = {**self._part(rest, any_value), **kept}
        return whole if self._is_fine(whole) else {}

    def _part(self, schema: Any, context: Schema) -> Any:
        """Return the enforceable part of a schema within another one, whose definitions are in ``context``."""
        if not isinstance(schema, Mapping) or self._fits({**context, **schema}):
            return schema
        kept: dict[str, Any] = {}
        for key, value in schema.items():
            part = self._value(key, value, context)
            if self._fits({**context, **kept, key: part}):
                kept[key] = part
        lost = {key for key in schema if key not in kept or _size(kept[key]) != _size(schema[key])}
        return {key: value for key, value in kept.items() if lost.isdisjoint(_REST_OF.get(key, ()))}

    def _value(self, key: str, value: Any, context: Schema) -> Any:
        if key in _NAMED and isinstance(value, Mapping):
            parts = {name: self._part(inner, context) for name, inner in value.items()}
            return {name: part for name, part in parts.items() if key == "properties" or self._fits({key: {name: {}}})}
        if key in _LISTED and isinstance(value, list):
            return [self._part(inner, context) for inner in value]
        return self._part(value, context) if key in _SINGLE else value

    def _fits(self, schema: Schema) -> bool:
        self._checks += 1
        return self._checks <= _MOST_CHECKS and self._is_fine(schema)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, Mapping) else 0


# Schemas that no text fits

_KINDS = frozenset({"null", "boolean", "number", "string", "array", "object"})
_NOTHING = frozenset[str]()
_MOST_PASSES = 100
"""Passes over the definitions of a schema."""


def fits_some_text(schema: Schema) -> bool:
    """Return False if values of ``schema`` would have no end, because each needs another one.

    Each subschema first accepts nothing, and then whatever can be built from what the others accept, until nothing
    changes.  Keywords that cannot make a value endless are taken to accept everything.
    """
    nodes = list(_nodes(schema))
    accepted = {id(node): _NOTHING for node in nodes}
    for _ in range(_MOST_PASSES):
        has_changed = False
        for node in reversed(nodes):
            kinds = _accepted(node, schema, accepted)
            has_changed |= kinds != accepted[id(node)]
            accepted[id(node)] = kinds
        if not has_changed:
            return bool(accepted[id(schema)])
    return True


def _nodes(schema: Schema) -> Iterator[Schema]:
    """Yield all subschemas that a value may have to match, those behind references included."""
    known, waiting = {id(schema)}, [schema]
    while waiting:
        node = waiting.pop()
        yield node
        for inner in _inner(node, schema):
            if isinstance(inner, Mapping) and id(inner) not in known:
                known.add(id(inner))
                waiting.append(inner)


def _inner(node: Schema, root: Schema) -> Iterator[Any]:
    if isinstance(reference := node.get("$ref"), str):
        yield referenced(reference, root)
    for key in _LISTED:
        yield from node[key] if isinstance(node.get(key), list) else ()
    if isinstance(named := node.get("properties"), Mapping):
        yield from named.values()
    yield from (node.get(key) for key in ("items", "additionalProperties"))


def _accepted(node: Schema, root: Schema, accepted: Mapping[int, frozenset[str]]) -> frozenset[str]:
    """Return the kinds of values that a subschema accepts, if its parts accept no more than ``accepted``."""

    def kinds_of(inner: Any) -> frozenset[str]:
        if inner is False:
            return _NOTHING
        return accepted.get(id(inner), _KINDS) if isinstance(inner, Mapping) else _KINDS

    kinds = _declared(node)
    if isinstance(reference := node.get("$ref"), str):
        kinds &= kinds_of(referenced(reference, root))
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := node.get(key), list):
            kinds &= frozenset().union(*map(kinds_of, branches))
    if isinstance(parts := node.get("allOf"), list):
        kinds &= _KINDS.intersection(*map(kinds_of, parts))
    if not all(map(kinds_of, _required(node))):
        kinds -= {"object"}
    if not all(map(kinds_of, _first_items(node))):
        kinds -= {"array"}
    return kinds


def _declared(node: Schema) -> frozenset[str]:
    declared = node.get("type", list(_KINDS))
    names = declared if isinstance(declared, list) else [declared]
    return _KINDS.intersection("number" if name == "integer" else name for name in names if isinstance(name, str))


def _required(node: Schema) -> Iterable[Any]:
    """Return the schemas of the properties that an object must have."""
    required, named = node.get("required"), node.get("properties")
    if not isinstance(required, list):
        return ()
    named = named if isinstance(named, Mapping) else {}
    other = True if "patternProperties" in node else node.get("additionalProperties")
    return [named.get(name, other) for name in required if isinstance(name, str)]


def _first_items(node: Schema) -> Iterable[Any]:
    """Return the schemas of the items that an array must have, those of the rest once."""
    least, first = node.get("minItems"), node.get("prefixItems")
    if not isinstance(least, int | float) or least < 1:
        return ()
    first = first if isinstance(first, list) else []
    return [*first[: int(least)], *([node.get("items")] if least > len(first) else [])]


def referenced(reference: str, root: Schema) -> Any:
    """Return the target of a reference within the schema; None for any other reference."""
    if not reference.startswith("#"):
        return None
    target: Any = root
    for step in filter(None, unquote(reference[1:]).split("/")):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            target = target[int(name)] if name.isdecimal() and int(name) < len(target) else None
        else:
            target = target.get(name) if isinstance(target, Mapping) else None
    return target
