"""All fields of the SDK's request, and all values of their literals, each in a request that is otherwise minimal."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, Union, get_args, get_origin

import typing_extensions as typed
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from tests.support.mcp_tools import PIXEL

Json: TypeAlias = Any

IMAGE = f"data:image/png;base64,{PIXEL}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}

BY_FIELD: Mapping[str, Json] = {
    "image_url": IMAGE,
    "file_data": "YQ==",
    "server_url": "https://mcp.invalid/sse",
    "headers": {"x": "y"},
    "parameters": SCHEMA,
    "schema": SCHEMA,
    "input_schema": SCHEMA,
    "output_schema": SCHEMA,
    "arguments": "{}",
    "model": "tiny",
    "metadata": {"a": "b"},
    "max_output_tokens": 16,
    "encrypted_content": "of another maker",
    "definition": "start: /a+/",
    "call_id": "call_1",
    "compact_threshold": 5000,
    "allowed_domains": ["example.com"],
    "domain": "example.com",
    "container": {"type": "auto"},
    "id": "msg_1",
    "url": "https://example.com",
}
"""Values of fields, where not any text or number will do."""

DICTIONARIES: Mapping[str, Json] = {"tools": {"type": "function", "name": "x"}}
"""Values of fields that the SDK types as a dictionary."""

BESIDE: Mapping[str, Json] = {
    "Mcp": {"server_url": "https://mcp.invalid"},
    "ContextManagement": {"type": "compaction"},
    "FunctionCallOutput": {"call_id": "call_1"},
    "ToolSearchCall": {"call_id": "call_1"},
    "ResponseToolSearchOutputItemParamParam": {"call_id": "call_1"},
    "ToolSearchToolParam": {"execution": "client"},
    "ResponseComputerToolCallOutputScreenshotParam": {"image_url": IMAGE},
    "ResponseConfigurationUpdateItemParamParam": {"reasoning": {"effort": "high"}},
    **{of_sdk: {"file_data": "YQ=="} for of_sdk in ("ResponseInputFileParam", "ResponseInputFileContentParam")},
    **{of_sdk: {"image_url": IMAGE} for of_sdk in ("ResponseInputImageParam", "ResponseInputImageContentParam")},
}
"""Fields without which objects of a type are not taken, though the SDK does not require them."""

BY_TYPE: Mapping[Any, Json] = {str: "x", int: 1, float: 0.5, object: {}}


class Probe(NamedTuple):
    """A value of a field, in a value of the object that holds it, and so on up to the request."""

    name: str
    """The type and field, and the value of a literal or the type of an object, as in ``Type.field=value``."""
    value: Json


def unwrapped(annotation: Any) -> Any:
    while get_origin(annotation) in (typed.Required, typed.NotRequired, Annotated):
        annotation = get_args(annotation)[0]
    return annotation


def choices(annotation: Any) -> list[Any]:
    """The types of a union, without that of null."""
    annotation = unwrapped(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return [choice for part in get_args(annotation) for choice in choices(part)]
    return [] if annotation is type(None) else [annotation]


def fields_of(of_sdk: Any) -> dict[str, Any]:
    return typed.get_type_hints(of_sdk, include_extras=True)


def minimal(of_sdk: Any) -> dict[str, Json]:
    """An object with the required fields."""
    hints = fields_of(of_sdk).items()
    required = {name: sample(name, hint) for name, hint in hints if get_origin(hint) is typed.Required}
    return {**required, **BESIDE.get(of_sdk.__name__, {})}


def sample(field: str, annotation: Any) -> Json:
    """The simplest value of a field."""
    return BY_FIELD[field] if field in BY_FIELD else next(values(field, annotation, set())).value


def values(field: str, annotation: Any, seen: set[Any]) -> Iterator[Probe]:
    """Yield a value of each choice of an annotation; objects that were not ``seen``, with each field in turn."""
    for choice in choices(annotation):
        origin = get_origin(choice)
        if origin is Literal:
            yield from (Probe(f"={value}", value) for value in get_args(choice))
        elif choice is bool:
            yield from (Probe(f"={str(value).lower()}", value) for value in (True, False))
        elif typed.is_typeddict(choice):
            yield Probe(f":{choice.__name__}", minimal(choice))
            if choice not in seen and choice.__name__ not in seen:
                seen.add(choice)
                yield from _of_each_field(choice, seen)
        elif origin is dict or choice is dict:
            yield Probe("", DICTIONARIES.get(field, BY_FIELD.get(field, {"a": "b"})))
        elif origin is not None and field in BY_FIELD:
            yield Probe("", BY_FIELD[field])
        elif origin is not None:
            yield from (Probe(name, [value]) for name, value in values(field, get_args(choice)[0], seen))
        else:
            yield Probe("", BY_FIELD.get(field, BY_TYPE[choice]))


def _of_each_field(of_sdk: Any, seen: set[Any]) -> Iterator[Probe]:
    base = minimal(of_sdk)
    for field, annotation in fields_of(of_sdk).items():
        for name, value in values(field, annotation, seen):
            yield Probe(name if _is_of_field(name) else f"{of_sdk.__name__}.{field}{name}", {**base, field: value})


def _is_of_field(name: str) -> bool:
    return "." in name.partition("=")[0]


def objects(without: Iterable[str]) -> dict[str, set[str]]:
    """The fields of the objects of a request, by the name of the type, but for some types and what only they hold."""
    found: dict[str, set[str]] = {}
    waiting, seen = list(fields_of(ResponseCreateParamsNonStreaming).values()), set[Any]()
    while waiting:
        for part in _parts(waiting.pop()):
            if typed.is_typeddict(part) and part not in seen and part.__name__ not in without:
                seen.add(part)
                hints = fields_of(part)
                found.setdefault(part.__name__, set()).update(hints)
                waiting += hints.values()
    return found


def _parts(annotation: Any) -> Iterator[Any]:
    for choice in choices(annotation):
        if get_origin(choice) not in (None, Literal):
            yield from (part for inner in get_args(choice) for part in _parts(inner))
        else:
            yield choice


def probes(without: Iterable[str]) -> Iterator[Probe]:
    """Yield parameters that are objects, with a value of each field and each literal; of some types, only one value.

    An object is probed where it stands first: so the input comes last, whose items may be refused as a whole.
    """
    hints, seen = fields_of(ResponseCreateParamsNonStreaming), set[Any](without)
    for parameter in sorted(hints, key=lambda name: name == "input"):
        for name, value in values(parameter, hints[parameter], seen):
            if _is_of_field(name) or ":" in name:
                yield Probe(name if _is_of_field(name) else f"{parameter}{name}", {parameter: value})
