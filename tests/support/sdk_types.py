"""All fields of the SDK's request, and all values of their literals, each in a request that is otherwise minimal."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import IO, Annotated, Any, Literal, NamedTuple, TypeAlias, Union, get_args, get_origin

import typing_extensions as typed
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import BaseModel

from penstock.pipeline.protocol.items import fingerprint_of
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
    "fingerprint": fingerprint_of("x"),
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

_NO_JSON: tuple[Any, ...] = (type(None), BaseModel, PathLike, IO)

BY_TYPE: Mapping[Any, Json] = {str: "x", int: 1, float: 0.5, object: {}}


class Probe(NamedTuple):
    """A value of a field, in a value of the object that holds it, and so on up to the request."""

    name: str
    """The type and field, and the value of a literal or the type of an object, as in ``Type.field=value``."""
    value: Json
    without: Json = None
    """The same without the field; None if that is all."""

    @property
    def field(self) -> str:
        """The type and field alone."""
        return re.split("[=:]", self.name, maxsplit=1)[0]


def unwrapped(annotation: Any) -> Any:
    while get_origin(annotation) in (typed.Required, typed.NotRequired, Annotated):
        annotation = get_args(annotation)[0]
    return annotation


def choices(annotation: Any) -> list[Any]:
    """The types of a union, without that of null, and those that are no JSON until the SDK writes them."""
    annotation = unwrapped(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return [choice for part in get_args(annotation) for choice in choices(part)]
    found = get_origin(annotation) or annotation
    return [] if isinstance(found, type) and issubclass(found, _NO_JSON) else [annotation]


def fields_of(of_sdk: Any) -> dict[str, Any]:
    return typed.get_type_hints(of_sdk, include_extras=True)


def name_of(of_sdk: Any) -> str:
    """The name of a type; a beta of the API has another type for what is the same."""
    return str(of_sdk.__name__.removeprefix("Beta"))


@dataclass(frozen=True)
class BodyTypes:
    """The types of a body, and what their objects need besides."""

    body: Any
    by_field: Mapping[str, Json]
    """Values of fields, where not any text or number will do."""
    beside: Mapping[str, Json]
    """Fields without which objects of a type are not taken, though the SDK does not require them."""
    dictionaries: Mapping[str, Json]
    """Values of fields that the SDK types as a dictionary."""
    last: str
    """The field that is probed last: an object is probed where it stands first, and an input is refused as a whole."""
    unknown: str = ""
    """A field that no type has, if one is to be probed in each object."""

    def minimal(self, of_sdk: Any) -> dict[str, Json]:
        """An object with the required fields."""
        hints = fields_of(of_sdk).items()
        required = {name: self._sample(name, hint) for name, hint in hints if get_origin(hint) is typed.Required}
        return {**required, **self.beside.get(name_of(of_sdk), {})}

    def _sample(self, field: str, annotation: Any) -> Json:
        """The simplest value of a field."""
        return self.by_field[field] if field in self.by_field else next(self._values(field, annotation, set())).value

    def _values(self, field: str, annotation: Any, seen: set[Any]) -> Iterator[Probe]:
        """Yield a value of each choice of an annotation; objects that were not ``seen``, with each field in turn."""
        for choice in choices(annotation):
            origin = get_origin(choice)
            if origin is Literal:
                yield from (Probe(f"={value}", value) for value in get_args(choice))
            elif choice is bool:
                yield from (Probe(f"={str(value).lower()}", value) for value in (True, False))
            elif typed.is_typeddict(choice):
                yield Probe(f":{name_of(choice)}", self.minimal(choice))
                if choice not in seen and name_of(choice) not in seen:
                    seen.add(choice)
                    yield from self._of_each_field(choice, seen)
            elif origin is dict or choice is dict:
                yield Probe("", self.dictionaries.get(field, self.by_field.get(field, {"a": "b"})))
            elif origin is not None and field in self.by_field:
                yield Probe("", self.by_field[field])
            elif origin is not None:
                for name, value, without in self._values(field, get_args(choice)[0], seen):
                    yield Probe(name, [value], without if without is None else [without])
            else:
                yield Probe("", self.by_field[field] if field in self.by_field else BY_TYPE[choice])

    def _of_each_field(self, of_sdk: Any, seen: set[Any]) -> Iterator[Probe]:
        base = self.minimal(of_sdk)
        fields = sorted(fields_of(of_sdk).items(), key=lambda hint: hint[0] == self.last)
        for field, annotation in [*fields, *([(self.unknown, str)] if self.unknown else [])]:
            for name, value, without in self._values(field, annotation, seen):
                of_field = "." in name.partition("=")[0]
                whole_name = name if of_field else f"{name_of(of_sdk)}.{field}{name}"
                yield Probe(whole_name, {**base, field: value}, base if without is None else {**base, field: without})

    def objects(self, without: Iterable[str]) -> dict[str, set[str]]:
        """The fields of the body and its objects, by the name of the type, but for some types and what they hold."""
        found: dict[str, set[str]] = {}
        waiting, seen = [self.body], set[Any]()
        while waiting:
            for part in _parts(waiting.pop()):
                if typed.is_typeddict(part) and part not in seen and name_of(part) not in without:
                    seen.add(part)
                    hints = fields_of(part)
                    found.setdefault(name_of(part), set()).update(hints)
                    waiting += hints.values()
        return found

    def probes(self, without: Iterable[str]) -> Iterator[Probe]:
        """Yield bodies with a value of each field and each literal, of the body and its objects; of some types, one."""
        return self._of_each_field(self.body, set[Any](without))


def _parts(annotation: Any) -> Iterator[Any]:
    for choice in choices(annotation):
        if get_origin(choice) not in (None, Literal):
            yield from (part for inner in get_args(choice) for part in _parts(inner))
        else:
            yield choice


@dataclass(frozen=True)
class Verdicts:
    """The verdict on each field of a body, and on each value."""

    taken: Mapping[str, str]
    """The fields of objects that have an effect, are part of what the model or the client reads, or are refused."""
    idle: Mapping[str, str]
    """The fields that are accepted and have no effect, with the reason: none of them restricts or changes an answer."""
    not_here: Mapping[str, str | None]
    """The objects that are refused with all of their fields, by their path; None if they are taken with any field."""
    refused: Mapping[str, str | None]
    """The fields and values that are refused, by their path; None for some that are taken all the same."""

    def expected(self, name: str) -> str | None:
        """The path of the error for a probe; None if it is taken."""
        field, _, of_type = name.partition(":")
        if name in self.refused:
            return self.refused[name]
        return self.not_here.get(of_type) or self.refused.get(field.partition("=")[0])

    @property
    def fields(self) -> dict[str, set[str]]:
        """The fields with a verdict, by the name of the type."""
        found = {name: set(fields.split()) for name, fields in self.taken.items()}
        for name in self.idle:
            of_sdk, field = name.split(".")
            found.setdefault(of_sdk, set()).add(field)
        return found


OPENAI = BodyTypes(ResponseCreateParamsNonStreaming, BY_FIELD, BESIDE, DICTIONARIES, last="input")
"""The body of Responses."""
