"""Objects that msgspec reads, mostly in lists, as fields of pydantic's models.

Pydantic takes twenty times as long for thousands of objects.  What msgspec refuses becomes one of pydantic's errors, so
that pydantic reports the first wrong value of a body, and adds the location of the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect
from pydantic import BaseModel, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, PydanticKnownError, core_schema

from penstock.pipeline.protocol.params.sent import whole

BATCH_OBJECTS = 100
"""The objects to convert at once: msgspec holds the GIL meanwhile."""

COMPONENT = "#/components/schemas/{name}Param"
"""The location of the schemas of the objects."""


@dataclass(frozen=True)
class ListOf:
    """Marks a field that is a list of structs; ``prepare`` changes each value before it is converted."""

    kind: Any
    prepare: Callable[[Any], Any] = lambda value: value

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        (schema,), _ = schemas(self.kind)
        schema.pop("discriminator", None)  # a client may leave the type out
        return {"type": "array", "items": schema}

    def read(self, values: Any) -> list[Any]:
        """Return the structs; raises one of pydantic's errors for the first value that is wrong."""
        if not isinstance(values, list | tuple):
            raise PydanticKnownError("list_type")
        read, batches = list[Any](), list[self.kind]  # type: ignore[name-defined]
        for start in range(0, len(values), BATCH_OBJECTS):
            batch = [self.prepare(value) for value in values[start : start + BATCH_OBJECTS]]
            try:
                read += whole(tuple(msgspec.convert(batch, batches, dec_hook=_model)))
            except msgspec.ValidationError as error:
                raise _refusal(error, batch, batches, start) from error
        return read


@dataclass(frozen=True)
class TextOrList(ListOf):
    """Marks a field that is a text or a list of structs."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, super().__get_pydantic_json_schema__(schema, handler)]}

    def read(self, values: Any) -> Any:
        """Return the text or the structs; raises one of pydantic's errors for the first value that is wrong."""
        return values if isinstance(values, str) else super().read(values)


@dataclass(frozen=True)
class TextOrObject(ListOf):
    """Marks a field that is a text or one struct."""

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        (schema,), _ = schemas(self.kind)
        return {"anyOf": [{"type": "string"}, schema]}

    def read(self, values: Any) -> Any:
        """Return the text or the struct; raises one of pydantic's errors for values that are neither."""
        if isinstance(values, str):
            return values
        try:
            return whole(msgspec.convert(values, self.kind, dec_hook=_model))
        except msgspec.ValidationError as error:
            raise _refusal(error, values, self.kind) from error


def schemas(*kinds: Any) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Return the JSON schemas of types of structs, and those of all that they refer to, by name."""
    return msgspec.json.schema_components(kinds, schema_hook=_reference, ref_template=COMPONENT)


def _model(kind: type[BaseModel], value: Any) -> BaseModel:
    """Validate an object that is one of pydantic's in a struct."""
    return kind.model_validate(value)


def _reference(kind: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": COMPONENT.format(name=kind.__name__)}


_NAMES = {"str": "string", "bool": "boolean", "int": "integer", "float": "number"}
"""JSON's names of types, by msgspec's name where that is another one."""

_BOUNDS = {
    "str of length >=": "empty_string",
    "str of length <=": "string_above_max_length",
    "int >=": "integer_below_min_value",
    "int <=": "integer_above_max_value",
    "array of length >=": "empty_array",
    "array of length <=": "array_above_max_length",
}
"""The codes of the API for values that break a bound, by msgspec's words for it."""


def _refusal(error: msgspec.ValidationError, value: Any, wanted: Any, start: int = 0) -> ValidationError:
    """Return pydantic's error for one of msgspec's about a value; a list has ``start`` values before it."""
    sentence, has_path, path = str(error).rpartition(" - at `")
    if not has_path:
        sentence, path = path, ""
    location, choices = _located(path, value, _types(wanted))
    kind: str | PydanticCustomError
    if isinstance(error.__cause__, ValidationError):  # of an object that pydantic reads
        first: Any = error.__cause__.errors(include_url=False, include_input=False)[0]
        location += first["loc"]
        kind = PydanticCustomError(first["type"], first["msg"], first.get("ctx"))
    elif sentence.startswith("Object "):  # it lacks the field that the sentence names, or does not know it
        location.append(sentence.partition("`")[2][:-1])
        kind = "missing" if sentence.startswith("Object missing") else "extra_forbidden"
    else:
        code, message = _meaning(sentence, choices)
        words: Any = message  # pydantic wants texts of the source here, and this one is made of them
        kind = PydanticCustomError("refused", words, {"code": code})
    if location and isinstance(at := location[0], int):
        location[0] = at + start
    details = InitErrorDetails(type=kind, loc=tuple(location), input=None)
    return ValidationError.from_exception_data("list", [details], hide_input=True)


def _meaning(sentence: str, choices: Sequence[Any]) -> tuple[str, str]:
    """Return the API's code and message for a sentence of msgspec's; only ``choices`` are allowed, if there are any."""
    if choices:
        return "invalid_value", f"Input should be one of {', '.join(map(repr, choices))}"
    if not sentence.startswith("Expected `"):
        return "invalid_value", "Input is not valid"
    kinds, _, bound = sentence.removeprefix("Expected `").partition("`")
    names = " or ".join(_NAMES.get(kind, kind) for kind in kinds.split(" | "))
    if bound.startswith(", got"):
        return "invalid_type", f"Input should be a valid {names}"
    return _BOUNDS.get(f"{kinds}{bound}".rpartition(" ")[0], "invalid_value"), f"Input should be a valid {names}{bound}"


def _located(path: str, value: Any, types: inspect.Type) -> tuple[list[int | str], list[Any]]:
    """Return the location in a value to which msgspec's path leads, and the literals that alone may stand there."""
    location, kinds = list[int | str](), _branches(types)
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        step = name or int(index)
        kinds = [inner for kind in kinds for inner in _within(kind, value, step)]
        location.append(step)
        value = value[step]
    if path.endswith("[...]`"):  # msgspec does not name the key in an object in which all are texts
        location += [key for key, each in value.items() if not isinstance(each, str)][:1]
    return location, [choice for kind in kinds if isinstance(kind, inspect.LiteralType) for choice in kind.values]


def _within(kind: inspect.Type, value: Any, step: int | str) -> Sequence[inspect.Type]:
    """Return what may stand at a step from a value, if that is of this type; a tag is a literal of each struct."""
    match kind:
        case inspect.ListType() | inspect.VarTupleType() if isinstance(step, int):
            return _branches(kind.item_type)
        case inspect.StructType() if step == kind.tag_field:
            return [inspect.LiteralType((kind.tag,))]
        case inspect.StructType() if isinstance(step, str) and value.get(kind.tag_field, kind.tag) == kind.tag:
            return [inner for field in kind.fields if field.encode_name == step for inner in _branches(field.type)]
        case _:
            return ()


_types = cache(inspect.type_info)


def _branches(types: inspect.Type) -> Sequence[inspect.Type]:
    return types.types if isinstance(types, inspect.UnionType) else (types,)
