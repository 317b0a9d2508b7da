"""Objects that msgspec reads, mostly in lists, as fields of pydantic's models.

Pydantic takes twenty times as long for thousands of objects.  What msgspec refuses becomes one of pydantic's errors, so
that every wrong value of a body is refused in the same words.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import msgspec
from msgspec import inspect
from pydantic import BaseModel, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, PydanticKnownError, core_schema

BATCH = 100
"""The objects to convert at once: msgspec holds the GIL meanwhile."""

COMPONENT = "#/components/schemas/{name}Param"
"""The place of the schemas of the objects."""

_Place: TypeAlias = tuple[int | str, ...]


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
        read = list[Any]()
        for start in range(0, len(values), BATCH):
            batch = [self.prepare(value) for value in values[start : start + BATCH]]
            try:
                read += msgspec.convert(batch, self._batch, dec_hook=_model)
            except msgspec.ValidationError as error:
                raise _refusal(error, batch, self._types, start) from error
        return read

    def _read_one(self, value: Any) -> Any:
        """Return one struct, as an element of a list is read; errors name no index."""
        try:
            return msgspec.convert([self.prepare(value)], self._batch, dec_hook=_model)[0]
        except msgspec.ValidationError as error:
            raise _refusal(error, [value], self._types) from error

    @cached_property
    def _batch(self) -> Any:
        return list[self.kind]  # type: ignore[name-defined]

    @cached_property
    def _types(self) -> inspect.Type:
        return inspect.type_info(self._batch)


@dataclass(frozen=True)
class TextOrObject(ListOf):
    """Marks a field that is a text or one struct."""

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, str) else self._read_one(value)
        )

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        (schema,), _ = schemas(self.kind)
        return {"anyOf": [{"type": "string"}, schema]}


def schemas(*kinds: Any) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Return the JSON schemas of types of structs, and those of all that they refer to, by name."""
    return msgspec.json.schema_components(kinds, schema_hook=_reference, ref_template=COMPONENT)


def _model(kind: type[BaseModel], value: Any) -> BaseModel:
    """Validate an object that is one of pydantic's in a struct."""
    return kind.model_validate(value)


def _reference(kind: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": COMPONENT.format(name=kind.__name__)}


_BOUNDS = (
    (r"Expected `str` of length >= (.*)", "string_too_short", "min_length"),
    (r"Expected `str` of length <= (.*)", "string_too_long", "max_length"),
    (r"Expected `str` matching regex (.*)", "string_pattern_mismatch", "pattern"),
    (r"Expected `int` >= (.*)", "greater_than_equal", "ge"),
    (r"Expected `int` <= (.*)", "less_than_equal", "le"),
)
"""Pydantic's errors for what msgspec says of a value that breaks a bound, with pydantic's name of the bound."""

_LISTS = (inspect.ListType, inspect.VarTupleType)

_KINDS = {"array": "list_type", "object": "dict_type", "str": "string_type", "bool": "bool_type", "int": "int_type"}
"""Pydantic's errors for a value that is none of the types that msgspec expects; the first of them is meant."""


def _refusal(
    error: msgspec.ValidationError, batch: list[Any], types: inspect.Type, start: int | None = None
) -> ValidationError:
    """Return pydantic's error for one of msgspec's about a batch that begins at ``start``, or about one value."""
    message, _, path = str(error).rpartition(" - at `")
    place: _Place = tuple(int(index) if index else name for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path))
    if path.endswith("[...]`"):  # a value of an object in which all are texts
        place = (*place, next(key for key, value in _at(batch, place).items() if not isinstance(value, str)))
    if isinstance(error.__cause__, ValidationError):  # of an object that pydantic reads
        first: Any = error.__cause__.errors(include_url=False, include_input=False)[0]
        place = (*place, *first["loc"])
        kind: Any = PydanticCustomError(first["type"], first["msg"], first.get("ctx"))
        context = dict[str, Any]()
    else:
        place, kind, context = _meaning(message, place, batch, types)
    index = () if start is None else (start + int(place[0]),)
    details = InitErrorDetails(type=kind, loc=(*index, *place[1:]), input=None, ctx=context)
    return ValidationError.from_exception_data("list", [details], hide_input=True)


def _meaning(message: str, place: _Place, batch: list[Any], types: inspect.Type) -> tuple[_Place, Any, dict[str, Any]]:
    """Return the place, the type and the context of pydantic's error for a message of msgspec's."""
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", message):
        return (*place, missing[1]), "missing", {}
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", message):
        return (*place, unknown[1]), "extra_forbidden", {}
    for pattern, kind, name in _BOUNDS:
        if bound := re.fullmatch(pattern, message):
            return place, kind, {name: literal_eval(bound[1])}
    tagged, literals = _allowed(place, batch, types)
    if tagged:
        tags = ", ".join(repr(struct.tag) for struct in tagged)
        context = {"discriminator": place[-1], "tag": str(_at(batch, place)), "expected_tags": tags}
        return place[:-1], "union_tag_invalid", context
    if literals:
        *others, last = map(repr, literals)
        return place, "literal_error", {"expected": f"{', '.join(others)} or {last}" if others else last}
    expected = re.findall(r"\w+", message.partition(", got")[0])
    return place, next(kind for name, kind in _KINDS.items() if name in expected), {}


def _allowed(place: _Place, value: Any, types: inspect.Type) -> tuple[list[inspect.StructType], list[Any]]:
    """Return the structs whose tag may stand at a place in a value, and the literals that may."""
    for step in place:
        if isinstance(step, int):
            types = next(kind.item_type for kind in _branches(types) if isinstance(kind, _LISTS))
        elif mapping := next((kind for kind in _branches(types) if isinstance(kind, inspect.DictType)), None):
            types = mapping.value_type
        else:
            structs = [kind for kind in _branches(types) if isinstance(kind, inspect.StructType)]
            if step == structs[0].tag_field:
                return structs, []
            struct = next(
                kind for kind in structs if kind.tag in (None, value.get(kind.tag_field)) or len(structs) == 1
            )
            types = next(field.type for field in struct.fields if field.encode_name == step)
        value = value[step]
    literals = [kind.values for kind in _branches(types) if isinstance(kind, inspect.LiteralType)]
    return [], [choice for values in literals for choice in values]


def _at(value: Any, place: _Place) -> Any:
    for step in place:
        value = value[step]
    return value


def _branches(types: inspect.Type) -> Sequence[inspect.Type]:
    return types.types if isinstance(types, inspect.UnionType) else (types,)
