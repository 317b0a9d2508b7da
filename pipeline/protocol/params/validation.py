"""Parse and validate request bodies, or refuse them with the path of the first wrong value.

In a long body, lists are validated element by element, so that one request does not block the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, TypeVar, get_args

from pydantic import ConfigDict, Tag, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol.params.common import UNSUPPORTED, Body
from penstock.pipeline.protocol.params.conversation import MOST_ITEMS
from penstock.pipeline.protocol.params.foreign_names import mistaken
from penstock.pipeline.protocol.params.items import InputItem, RawMessage, SteeringMessage
from penstock.pipeline.protocol.params.json_body import PIECE, YieldPoint, read_json, shortened
from penstock.pipeline.protocol.params.request import CreateResponse, Envelope, SteerResponse
from penstock.pipeline.protocol.params.tools import ToolParam

Value = TypeVar("Value")
AnyBody = TypeVar("AnyBody", bound=Body)

_discreet = ConfigDict(hide_input_in_errors=True)
_elements: dict[str, TypeAdapter[Any]] = {
    "input": TypeAdapter(InputItem, config=_discreet),
    "items": TypeAdapter(InputItem, config=_discreet),
    "tools": TypeAdapter(ToolParam, config=_discreet),
    "previous_input_messages": TypeAdapter(RawMessage),
}
_steering: dict[str, TypeAdapter[Any]] = {"input": TypeAdapter(SteeringMessage)}

_CHUNKS = {"summary": 500, "content": 500, "output": 500, "tool_calls": 500, "tools": 1}
"""The number of parts of an item to validate at once; it is 1 for tools, because a tool may contain many others."""

MOST_NAMES = 500
"""The most names in a body among which a misspelt one is searched for: a few milliseconds' work."""


async def read_request(body: bytes, envelope: Envelope | None = None) -> CreateResponse:
    """Read the body of a request for a response, as `read_body` does."""
    request = await read_body(body, CreateResponse)
    return request.inside(envelope) if envelope else request


async def read_body(body: bytes, shape: type[AnyBody]) -> AnyBody:
    """Read a body as an object of the class ``shape``.

    Raises `InvalidRequest` with the path of the first wrong value; in a long body, lists are checked last.
    """
    may_yield = YieldPoint()
    parsed = await read_json(body, may_yield)
    await may_yield()
    _check_names(parsed, shape)
    elements = _steering if shape is SteerResponse else _elements
    lists = _apart(parsed, shape) if len(body) > PIECE else {}
    request = _validated(shape.model_validate, parsed | {name: [] for name in lists} if lists else parsed, ())
    read = {
        name: [
            await _element(elements[name].validate_python, (name, position), value, may_yield)
            for position, value in enumerate(values)
        ]
        for name, values in lists.items()
    }
    return request.model_copy(update=read)


def _check_names(parsed: Any, shape: type[Body]) -> None:
    """Raise `InvalidRequest` for a parameter of another API, and for an ``input`` only under a misspelt name.

    Other unknown names are ignored.
    """
    known = shape.model_fields.keys()
    if not isinstance(parsed, dict) or "input" not in known:
        return
    if foreign := mistaken(parsed):
        raise _unknown(*foreign)
    if len(parsed) <= MOST_NAMES and "input" not in parsed:
        for name in get_close_matches("input", parsed.keys() - known, n=1, cutoff=0.7):
            raise _unknown(name, "input")


def _unknown(name: str, meant: str | None) -> InvalidRequest:
    has = f"this API has {meant!r}" if meant else "this API has nothing like it"
    message = f"There is no parameter {shortened(name)!r}: {has}."
    return InvalidRequest(message, param=shortened(name), code="unknown_parameter")


def _apart(parsed: Any, shape: type[Body]) -> dict[str, list[Any]]:
    """Return the lists of a body to validate element by element.

    A list of too many items is not among them: it is refused with the rest of the body.
    """
    lists = _lists(parsed, [name for name in _elements if name in shape.model_fields])
    return {name: many for name, many in lists.items() if name != "items" or len(many) <= MOST_ITEMS}


def _lists(value: Any, names: Iterable[str]) -> dict[str, list[Any]]:
    """Return the lists among the named values of an object."""
    if not isinstance(value, dict):
        return {}
    return {name: many for name in names if isinstance(many := value.get(name), list)}


def _long_lists(value: Any) -> dict[str, list[Any]]:
    """Return the lists of an item that are too long to validate at once."""
    return {key: parts for key, parts in _lists(value, _CHUNKS).items() if len(parts) > _CHUNKS[key]}


async def _element(validate: Callable[[Any], Any], place: tuple[str, int], value: Any, may_yield: YieldPoint) -> Any:
    """Validate one element of a list.

    A long list inside it is validated in chunks, each as part of a copy of the element with its other known fields.
    """
    await may_yield()
    if place[0] == "tools" or not (lists := _long_lists(value)):
        return _validated(validate, value, place)
    element = _validated(validate, value | {key: parts[: _CHUNKS[key]] for key, parts in lists.items()}, place)
    known = type(element).model_fields
    rest = {key: field_value for key, field_value in value.items() if key in known and key not in lists}
    for key in lists.keys() & known:
        for start in range(_CHUNKS[key], len(lists[key]), _CHUNKS[key]):
            await may_yield()
            chunk = rest | {key: lists[key][start : start + _CHUNKS[key]]}
            getattr(element, key).extend(getattr(_validated(validate, chunk, place, start), key))
    return element


def _validated(validate: Callable[[Any], Value], value: Any, place: tuple[str | int, ...], start: int = 0) -> Value:
    """Validate ``value``, which stands at ``place`` in the body; lists in it are chunks that begin at ``start``."""
    try:
        return validate(value)
    except ValidationError as error:
        raise _refusal(error, place, start) from error


def _refusal(error: ValidationError, place: tuple[str | int, ...], start: int) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    location, context = (*place, *_shifted(first["loc"], start)), first.get("ctx", {})
    message = _JSON_WORDS.get(first["type"], first["msg"])
    if first["type"] == "union_tag_invalid":
        tag = shortened(context["tag"])
        message, location = f"Type {tag!r} is none of {context['expected_tags']}", (*location, "type")
    elif first["type"] == "union_tag_not_found":
        message, location = "Field required", (*location, "type")
    param = _path(location)
    refused = UnsupportedParameter if first["type"] == UNSUPPORTED else InvalidRequest
    return refused(f"{message} (at {param})" if param else message, param=param, code=_code(first))


def _code(error: ErrorDetails) -> str:
    """Return OpenAI's code for one of pydantic's errors."""
    kind, context = error["type"], error.get("ctx", {})
    if kind.startswith(("greater_than", "less_than")):
        is_integer = all(isinstance(bound, int) for bound in context.values())
        bound = "below_min_value" if kind.startswith("greater_than") else "above_max_value"
        return f"{'integer' if is_integer else 'decimal'}_{bound}"
    return "invalid_type" if kind.endswith("_type") else _CODES.get(kind, "invalid_value")


def _shifted(location: Sequence[int | str], start: int) -> Iterator[int | str]:
    """Convert a location in a chunk of a list to a location in the list."""
    for step in location:
        yield step + start if isinstance(step, int) else step
        start = 0 if isinstance(step, int) else start


def _path(location: Sequence[int | str]) -> str | None:
    """Format a location as a client would write it, ``input[0].content``, without pydantic's union tags."""
    path = ""
    for before, step in pairwise(("", *location)):
        if isinstance(step, int):
            path += f"[{step}]"
        elif not _is_tag(step, before):
            path += f".{shortened(step)}" if path else step
    return path or None


def _is_tag(step: str, before: int | str) -> bool:
    """Return True if a step is the branch of a union, not a key of the body, which may have the same name."""
    if step == "[key]":
        return before != "metadata"
    return step in (_ELEMENT_TAGS if isinstance(before, int) else _TAGS.get(before, ()))


_JSON_WORDS = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "Input should be an object"),
    "list_type": "Input should be a valid array",
}
"""Pydantic's messages for JSON input, in place of its messages for Python values, which are validated here."""

_CODES = {
    "missing": "missing_required_parameter",
    "union_tag_not_found": "missing_required_parameter",
    "string_too_short": "empty_string",
    "string_too_long": "string_above_max_length",
    "too_short": "empty_array",
    "too_long": "array_above_max_length",
    "too_many_keys": "object_above_max_properties",
    "extra_forbidden": "unknown_parameter",
    UNSUPPORTED: UNSUPPORTED,
}
"""OpenAI's codes for wrong values, by pydantic's type of the error."""

_TEXT_OR_OTHER = frozenset({"as_text", "as_other"})
_TAGS = {
    **dict.fromkeys(("input", "content", "output", "stop", "conversation", "container"), _TEXT_OR_OTHER),
    **dict.fromkeys(("require_approval", "error", "json", "structural_tag"), _TEXT_OR_OTHER),
    "allowed_tools": frozenset({"as_list", "as_object"}),
    "tool_choice": frozenset({"as_text", "function", "custom", "mcp", "allowed_tools", "other"}),
    "format": frozenset({"text", "grammar", "json_schema", "json_object"}),
    "environment": frozenset({"local", "container_auto", "container_reference"}),
}
"""Pydantic's tags for the branches of open types, by the key before them in a location."""


def _tags(union: Any) -> frozenset[str]:
    """Return the tags of a union's branches."""
    branches = get_args(get_args(union)[0])
    return frozenset(tag.tag for branch in branches for tag in branch.__metadata__ if isinstance(tag, Tag))


_PART_TAGS = frozenset({"input_text", "output_text", "refusal", "input_image", "input_file"})
_ELEMENT_TAGS = _tags(InputItem) | _tags(ToolParam) | _PART_TAGS
"""Pydantic's tags for list elements, which follow an index."""
