"""Masked texts: the texts of users, models and tools become placeholder characters of the same shape.

Names, ids and the literals of the protocol stay, so that the recording still shows what happened.  A string counts as
text unless it is known to be something else.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect
from msgspec.structs import replace

from penstock.pipeline.protocol.items import fingerprint_of

_SHOWN = frozenset(
    {"id", "call_id", "item_id", "name", "namespace", "label", "server_label", "connector", "model", "date"}
    | {"container_id", "approval_request_id", "previous_response_id", "conversation", "service_tier", "include"}
    | {"allowed", "names", "tool_choice", "caller", "caller_id"}
)
"""Struct fields that hold names, ids and the like, and stay as they are."""

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
"""Struct fields that hold texts in a form of their own, with the value that replaces them.

``stop`` is among them because a stop string does not fit masked text.
"""

_SHOWN_KEYS = frozenset(
    {"type", "name", "role", "status", "server_label", "id", "call_id", "namespace", "channel", "verbosity"}
    | {"syntax", "mode", "require_approval", "search_context_size", "reasoning_effort", "caller_id"}
)
"""Keys of plain JSON objects whose string values stay as they are."""

_EMPTIED_KEYS = frozenset({"parameters", "schema", "input_schema", "env"})


_ON_THE_WIRE = _SHOWN_KEYS | frozenset(
    {"object", "model", "finish_reason", "stop_reason", "item_id", "call_id", "tool_call_id", "tool_use_id"}
    | {"response_id", "service_tier", "system_fingerprint", "effort", "tool_choice", "truncation", "code", "phase"}
)
"""The same keys in answers of any server; a ``code`` is that of an error, or a text."""

_SPELLED_OUT = frozenset({"logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs", "metadata"})
"""Keys of answers whose values hold texts in a form of their own, and are left out."""


def mask(text: str) -> str:
    """Replace letters by x and digits by 0, keeping all other characters."""
    return text.translate(_MASKS)


class _Masks(dict[int, str]):
    def __missing__(self, point: int) -> str:
        character = chr(point)
        self[point] = {"L": "x", "M": "x", "N": "0"}.get(unicodedata.category(character)[0], character)
        return self[point]


_MASKS = _Masks()


def mask_texts(struct: Any) -> Any:
    """Return a copy of a struct with its texts masked."""
    kind: Any = type(struct)
    changes: dict[str, Any] = {}
    for name in kind.__struct_fields__:
        if name == "held_to_grammar":
            changes[name] = False  # masked text does not match the grammar
        elif name in _EMPTIED and not isinstance(getattr(struct, name), int | None):
            changes[name] = _EMPTIED[name]
        elif name == "fingerprint":
            changes[name] = fingerprint_of(mask(struct.code))  # a replay makes it of the masked code
        elif name not in _shown(kind):
            changes[name] = _masked(getattr(struct, name))
    return replace(struct, **changes)


def mask_json(value: Any) -> Any:
    """Return JSON of an answer with its texts masked."""
    match value:
        case str():
            return mask(value)
        case list():
            return [mask_json(each) for each in value]
        case dict():
            shown = _ON_THE_WIRE if "message" in value else _ON_THE_WIRE - {"code"}
            return {key: _on_the_wire(key, each, shown) for key, each in value.items() if key not in _SPELLED_OUT}
        case _:
            return value


def _on_the_wire(key: str, value: Any, shown: Collection[str]) -> Any:
    if key in _EMPTIED_KEYS and isinstance(value, dict):
        return {}
    return value if key in shown and isinstance(value, str) else mask_json(value)


def _masked(value: Any) -> Any:
    match value:
        case str():
            return mask(value)
        case msgspec.Struct():
            return mask_texts(value)
        case tuple() | list():
            return type(value)(map(_masked, value))
        case dict():
            return {key: _of_object(key, each) for key, each in value.items()}
        case _:
            return value


def _of_object(key: str, value: Any) -> Any:
    if key in _EMPTIED_KEYS:
        return {}
    return value if key in _SHOWN_KEYS and isinstance(value, str) else _masked(value)


@cache
def _shown(kind: Any) -> frozenset[str]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    literal_fields = {field.name for field in info.fields if _is_spelled(field.type)}
    return frozenset(_SHOWN | literal_fields | ({"code"} if kind.__name__ == "ErrorDetails" else set()))


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
