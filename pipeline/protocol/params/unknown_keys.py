"""Keys in the objects of a body that no field of them reads."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from types import EllipsisType, NoneType
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import msgspec
from pydantic import BaseModel

MOST_OBJECTS = 10_000
"""The most objects and lists in a body that are compared; more would take a tenth of a second."""

_OBJECTS = (msgspec.Struct, BaseModel, list, tuple)

_PLAIN = (str, int, float, bool, bytes, dict, NoneType, EllipsisType, msgspec.UnsetType)
"""Types whose values are no objects, or have keys of any name."""

_Location: TypeAlias = "tuple[_Location, str | int] | None"
"""The location of an object: that of the one that it is in, and its key or its index there."""

MOST_KEYS = 20
"""The most keys that are found in one body."""


def unknown_keys(read: Any, sent: Any) -> list[str]:
    """Return the locations of unknown keys with a value, below the top level of a body: of each, the first one.

    ``read`` is what was read of the JSON ``sent``.  A class names in ``unused`` the keys that mean nothing here.
    """
    found: dict[tuple[type, str], str] = {}
    waiting: list[tuple[Any, Any, _Location]] = [(read, sent, None)]
    for each, its, location in waiting:  # it grows meanwhile: a generator for each object would take ten times as long
        if isinstance(each, list | tuple):
            pairs = enumerate(zip(each, its, strict=False)) if isinstance(its, list) else ()
            waiting += [(inner, of_it, (location, at)) for at, (inner, of_it) in pairs if isinstance(inner, _OBJECTS)]
        elif isinstance(its, dict):
            kind: Any = type(each)
            fields, known = _shape(kind)
            if location is not None and not its.keys() <= known:
                for key in [key for key, value in its.items() if key not in known and value is not None]:
                    found.setdefault((kind, key), _written((location, key)))
            for key, value in its.items():
                inner = getattr(each, fields[key]) if isinstance(value, dict | list) and key in fields else None
                if isinstance(inner, _OBJECTS):
                    waiting.append((inner, value, (location, key)))
        if len(found) >= MOST_KEYS or len(waiting) > MOST_OBJECTS:
            break
    return list(found.values())


def _written(location: _Location) -> str:
    before, step = location or (None, "")
    if before is None:
        return str(step)
    return f"{_written(before)}[{step}]" if isinstance(step, int) else f"{_written(before)}.{step}"


@cache
def _shape(kind: Hashable) -> tuple[dict[str, str], frozenset[str]]:
    """Return the names of the fields of a class that may hold objects, by their keys, and the keys that it knows."""
    tag: str | None = None
    fields: tuple[tuple[str, str], ...] = ()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = tuple(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
        tag = kind.__struct_config__.tag_field
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = tuple((name, field.alias or name) for name, field in kind.model_fields.items())
    unused: frozenset[str] = getattr(kind, "unused", frozenset())
    known = unused | {key for _, key in fields} | ({tag} if tag else set())
    hints = _hints_of(kind) if fields else {}
    return {key: name for name, key in fields if _may_hold(hints.get(name, Any))}, known


def _hints_of(kind: Any) -> dict[str, Any]:
    try:
        return get_type_hints(kind)
    except NameError:  # a class of a plug-in may have types that are imported for type checkers alone
        return {}


def _may_hold(annotation: Any) -> bool:
    """Return True if a value of a type may be an object, or a list of some."""
    if get_origin(annotation) in (Literal, dict) or annotation in _PLAIN:
        return False
    inner = get_args(annotation)
    return any(map(_may_hold, inner)) if inner else True
