"""Texts crossed out: what users, models and tools said becomes characters of the same shape.

Names stay, and so do ids and whatever the protocol spells: what happened can be read from the rest.  A string is taken
for a text unless it is known for something else.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect
from msgspec.structs import replace

_SHOWN = frozenset(
    {"id", "call_id", "item_id", "name", "namespace", "label", "server_label", "connector", "model", "date"}
    | {"container_id", "approval_request_id", "previous_response_id", "conversation", "service_tier", "include"}
    | {"allowed", "names", "tool_choice"}
)
"""Fields that hold names and the like."""

_EMPTIED: dict[str, Any] = {
    "logprobs": (),
    "metadata": {},
    "parameters": None,
    "input_schema": {},
    "stop": (),
    "grammar": None,
    "structured": {},
    "variables": {},
}
"""Fields that hold texts in a form of their own.

What is crossed out is no longer what a stop text made of it.
"""

_SHOWN_KEYS = frozenset(
    {"type", "name", "role", "status", "server_label", "id", "call_id", "namespace", "channel", "verbosity"}
    | {"syntax", "mode", "require_approval", "search_context_size", "reasoning_effort"}
)
"""Likewise of objects that are no structs."""

_EMPTIED_KEYS = frozenset({"parameters", "schema", "input_schema", "env"})


def shape(text: str) -> str:
    """Letters become x, digits 0; all else stays."""
    return text.translate(_SHAPES)


class _Shapes(dict[int, str]):
    """What becomes of characters, as `str.translate` asks for it: of each once."""

    def __missing__(self, point: int) -> str:
        character = chr(point)
        match unicodedata.category(character)[0]:
            case "L" | "M":
                shown = "x"
            case "N":
                shown = "0"
            case _:
                shown = character
        self[point] = shown
        return shown


_SHAPES = _Shapes()


def without_texts(struct: Any) -> Any:
    """The same struct, its texts crossed out."""
    kind: Any = type(struct)
    changes: dict[str, Any] = {}
    for name in kind.__struct_fields__:
        if name == "held_to_grammar":
            changes[name] = False  # what is crossed out matches none
        elif name in _EMPTIED and not isinstance(getattr(struct, name), int | None):
            changes[name] = _EMPTIED[name]
        elif name not in _shown(kind):
            changes[name] = _crossed_out(getattr(struct, name))
    return replace(struct, **changes)


def _crossed_out(value: Any) -> Any:
    match value:
        case str():
            return shape(value)
        case msgspec.Struct():
            return without_texts(value)
        case tuple() | list():
            return type(value)(map(_crossed_out, value))
        case dict():
            return {key: _of_object(key, each) for key, each in value.items()}
        case _:
            return value


def _of_object(key: str, value: Any) -> Any:
    if key in _EMPTIED_KEYS:
        return {}
    return value if key in _SHOWN_KEYS and isinstance(value, str) else _crossed_out(value)


@cache
def _shown(kind: Any) -> frozenset[str]:
    """The fields that stay: names, and what the protocol spells."""
    told = inspect.type_info(kind)
    assert isinstance(told, inspect.StructType)
    spelled = {field.name for field in told.fields if _is_spelled(field.type)}
    return frozenset(_SHOWN | spelled | ({"code"} if kind.__name__ == "ErrorDetails" else set()))


def _is_spelled(kind: inspect.Type) -> bool:
    match kind:
        case inspect.LiteralType() | inspect.NoneType():
            return True
        case inspect.UnionType():
            return all(map(_is_spelled, kind.types))
        case inspect.VarTupleType():
            return _is_spelled(kind.item_type)
        case _:
            return False
