"""The arguments of calls by the JSON schemas of their tools.

A schema is a client's and the arguments are a model's, so neither may take long: the steps of a check are counted.
What is not checked is accepted: the keywords that are not named here, and a keyword whose value makes no sense.  A
pattern is not checked: to make a short one ready may take a second, in which no other thread runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from penstock.pipeline.protocol.params.json_body import shortened
from penstock.services.json_size import JsonSize, exceeds
from penstock.stages.render.schemas import referenced

LARGEST: Final = JsonSize(containers=10_000, commas=20_000)
"""The size of the arguments of a call."""

MOST_STEPS: Final = 100_000
"""Parts of schemas that are compared with parts of the arguments of the calls of one round."""

SHOWN: Final = 10
"""Types, or values, that an error names."""

_TYPES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and (isinstance(value, int) or value.is_integer()),
    "number": lambda value: _is_number(value),  # noqa: PLW0108 - it is defined below
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_BOUNDS: Final[Mapping[str, tuple[Callable[[Any, float], bool], str]]] = {
    "minimum": (lambda value, bound: not _is_number(value) or value >= bound, "is less than"),
    "exclusiveMinimum": (lambda value, bound: not _is_number(value) or value > bound, "is not more than"),
    "maximum": (lambda value, bound: not _is_number(value) or value <= bound, "is more than"),
    "exclusiveMaximum": (lambda value, bound: not _is_number(value) or value < bound, "is not less than"),
    "minLength": (lambda value, bound: not isinstance(value, str) or len(value) >= bound, "is shorter than"),
    "maxLength": (lambda value, bound: not isinstance(value, str) or len(value) <= bound, "is longer than"),
    "minItems": (lambda value, bound: not isinstance(value, list) or len(value) >= bound, "has fewer items than"),
    "maxItems": (lambda value, bound: not isinstance(value, list) or len(value) <= bound, "has more items than"),
}


class WrongArguments(ValueError):
    """The arguments do not fit; the message says where and why."""


def parsed(arguments: str) -> Any:
    """Return the value of JSON that is no larger than ``LARGEST``; raises `WrongArguments`."""
    try:
        is_large = exceeds(arguments.encode(), LARGEST)
        value = None if is_large else json.loads(arguments, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise WrongArguments(f"the arguments are no JSON: {error}") from None
    if is_large:
        raise WrongArguments("the arguments have too many values")
    return value


class Checks:
    """The checks of the calls of one round, which have so many steps together and no more."""

    def __init__(self) -> None:
        self._left = MOST_STEPS
        self._referenced: dict[str, Any] = {}
        self._root: Mapping[str, Any] = {}
        self._size = 0

    def check(self, arguments: str, schema: Mapping[str, Any]) -> None:
        """Raise `WrongArguments` if the arguments are no JSON object, or one that the schema does not allow."""
        value = parsed(arguments)
        if not isinstance(value, dict):
            raise WrongArguments("the arguments are no object")
        self._root, self._size, self._referenced = schema, arguments.count(",") + 1, {}
        try:
            problem = next(self._problems(value, schema, ""), None)
        except RecursionError:
            problem = "the arguments are nested too deeply to be checked"
        if problem:
            raise WrongArguments(problem)

    def _problems(self, value: Any, schema: Any, place: str) -> Iterator[str]:
        """Yield what is wrong with a value at a place."""
        self._spend(1)
        if schema is False:
            yield f"{place or 'the object'} is not allowed"
        if not isinstance(schema, Mapping):
            return
        yield from self._of_value(value, schema, place or "the object")
        yield from self._of_others(value, schema, place)
        if isinstance(value, dict):
            yield from self._of_object(value, schema, place)
        if isinstance(value, list):
            yield from self._of_array(value, schema, place)

    def _of_value(self, value: Any, schema: Mapping[str, Any], named: str) -> Iterator[str]:
        """Yield what is wrong by the keywords that hold no schemas."""
        types = schema.get("type", ())
        types = (types,) if isinstance(types, str) else types if isinstance(types, list) else ()
        self._spend(len(types))
        if types and all(isinstance(kind, str) and kind in _TYPES and not _TYPES[kind](value) for kind in types):
            yield f"{named} is no {' or '.join(types[:SHOWN])}"
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(choices, list) and choices:
            self._spend(len(choices) * (self._size if isinstance(value, list | dict) else 1))
            if not any(_same(value, choice) for choice in choices):
                yield f"{named} is none of {', '.join(map(_shown, choices[:SHOWN]))}"
        for keyword, (fits, words) in _BOUNDS.items():
            bound = schema.get(keyword)
            if isinstance(bound, int | float) and not fits(value, bound):
                yield f"{named} {words} {bound}"

    def _of_others(self, value: Any, schema: Mapping[str, Any], place: str) -> Iterator[str]:
        """Yield what is wrong by the schemas that hold for the same value."""
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._referenced:  # to follow one takes as long as it is
                self._referenced[reference] = referenced(reference, self._root)
            yield from self._problems(value, self._referenced[reference], place)
        for part in _list(schema, "allOf"):
            yield from self._problems(value, part, place)
        for keyword in ("anyOf", "oneOf"):
            found = [next(self._problems(value, part, place), "") for part in _list(schema, keyword)]
            if found and all(found):
                yield found[0] if len(found) == 1 else f"{place or 'the object'} fits no alternative: {found[0]}"

    def _of_object(self, value: dict[str, Any], schema: Mapping[str, Any], place: str) -> Iterator[str]:
        required = _list(schema, "required")
        self._spend(len(required))
        for name in required:
            if isinstance(name, str) and name not in value:
                yield f"{_joined(place, name)} is missing"
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        rest = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        for name, inner in value.items():
            yield from self._problems(inner, properties.get(name, rest), _joined(place, name))

    def _of_array(self, value: list[Any], schema: Mapping[str, Any], place: str) -> Iterator[str]:
        first = _list(schema, "prefixItems")
        for at, inner in enumerate(value):
            part = first[at] if at < len(first) else schema.get("items", True)
            yield from self._problems(inner, part, f"{place}[{at}]")

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise WrongArguments("the arguments take too long to be checked")


def _same(one: Any, other: Any) -> bool:
    """Return True if two values are the same in JSON, where 1 is 1.0 and not true."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(choice: Any) -> str:
    return "..." if isinstance(choice, dict | list) else shortened(json.dumps(choice, ensure_ascii=False))


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def _joined(place: str, name: str) -> str:
    return f"{place}.{shortened(name)}" if place else shortened(name)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is none of its words")
