"""The input of a decision, as openai-python 3.52 writes it, and the items of a conversation that it becomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta
from pydantic import AfterValidator
from pydantic_core import PydanticKnownError

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.params import items as params
from penstock.pipeline.protocol.params.structs import TextOrList
from penstock.stages.render.item_texts import json_text

MOST_JSON_LEVELS = 32
"""Objects and lists of an ``input_json`` that stand one in the other."""

MOST_JSON_VALUES = 10_000
"""Values of an ``input_json``."""

MOST_JSON_BYTES = 256 * 2**10
"""Bytes of an ``input_json``, written without white space."""

_CallId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
_Name: TypeAlias = Annotated[str, Meta(min_length=1)]
_Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class Closed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object in a body: types are strict, and keys that the API does not have are refused."""


# Content parts


class CacheBreakpoint(Closed, frozen=True, kw_only=True):
    mode: Literal["explicit"]


class DecisionText(Closed, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class DecisionImage(Closed, frozen=True, kw_only=True, tag_field="type", tag="input_image"):
    image_url: str
    detail: wire.ImageDetail | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class DecisionJson(Closed, frozen=True, kw_only=True, tag_field="type", tag="input_json"):
    data: dict[str, Any] | list[dict[str, Any]]


class DecisionOutputText(Closed, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str


class DecisionRefusal(Closed, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    refusal: str


DecisionPart: TypeAlias = DecisionText | DecisionImage | DecisionJson
AnyPart: TypeAlias = DecisionPart | DecisionOutputText | DecisionRefusal

# Items


class DecisionMessage(Closed, frozen=True, kw_only=True, tag_field="type", tag="message"):
    role: wire.Role
    content: str | tuple[AnyPart, ...]
    phase: Literal["commentary", "final_answer"] | None = None


class DecisionFunctionCall(Closed, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    arguments: str
    call_id: _CallId
    name: _Name
    id: str | None = None
    namespace: str | None = None
    status: _Status | None = None


class DecisionFunctionCallOutput(Closed, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    call_id: _CallId
    output: str | tuple[DecisionText | DecisionImage, ...]
    id: str | None = None
    status: _Status | None = None


class DecisionCustomToolCall(Closed, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    call_id: _CallId
    input: str
    name: _Name
    id: str | None = None
    namespace: str | None = None
    status: _Status | None = None


class DecisionCustomToolCallOutput(Closed, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call_output"):
    call_id: _CallId
    output: str | tuple[DecisionText | DecisionImage, ...]
    id: str | None = None
    status: _Status | None = None


DecisionItem: TypeAlias = (
    DecisionMessage
    | DecisionFunctionCall
    | DecisionFunctionCallOutput
    | DecisionCustomToolCall
    | DecisionCustomToolCallOutput
)


def _explicit(value: Any) -> Any:
    """Return an item with its type, which a message may lack."""
    return {"type": "message", **value} if isinstance(value, dict) else value


def _has_items(value: Any) -> Any:
    if value == []:
        raise PydanticKnownError("too_short", {"field_type": "List", "min_length": 1, "actual_length": 0})
    return value


DecisionInput: TypeAlias = Annotated[
    str | list[DecisionItem], TextOrList(DecisionItem, _explicit), AfterValidator(_has_items)
]

_OF_ROLE: dict[str, tuple[type[AnyPart], ...]] = {
    "user": (DecisionText, DecisionImage, DecisionJson),
    "developer": (DecisionText,),
    "system": (DecisionText,),
    "assistant": (DecisionOutputText, DecisionRefusal),
}
"""The parts of a message of each role."""


def item_of(item: DecisionItem, path: str) -> params.InputItem:
    """Return an item of the input at ``path``; raises `InvalidRequest` for a part that its message cannot have."""
    match item:
        case DecisionMessage():
            return _message(item, path)
        case DecisionFunctionCall():
            return wire.FunctionCall("", **_call(item), arguments=item.arguments)
        case DecisionCustomToolCall():
            return wire.CustomToolCall("", **_call(item), input=item.input)
        case DecisionFunctionCallOutput():
            return wire.FunctionCallOutput("", item.call_id, _output(item.output), "completed")
        case DecisionCustomToolCallOutput():
            return wire.CustomToolCallOutput("", item.call_id, _output(item.output), "completed")


def _call(call: DecisionFunctionCall | DecisionCustomToolCall) -> dict[str, Any]:
    """Return the fields of a call; one that its model did not finish counts as made, as its input shows it."""
    namespace = UNSET if call.namespace is None else call.namespace
    return {"call_id": call.call_id, "name": call.name, "namespace": namespace, "status": "completed"}


def _output(output: str | Sequence[DecisionText | DecisionImage]) -> str | tuple[wire.InputPart, ...]:
    return output if isinstance(output, str) else tuple(input_part(part, "") for part in output)


def _message(message: DecisionMessage, path: str) -> wire.Message:
    role, content = message.role, message.content
    if message.phase is not None and role != "assistant":
        raise _wrong("Only a message of the assistant has a phase", f"{path}.phase", "invalid_value")
    whole = content if isinstance(content, str) else tuple(_parts(content, role, f"{path}.content"))
    read = params.message(role, whole)
    return read if message.phase is None else msgspec.structs.replace(read, phase=message.phase)


def _parts(content: Sequence[AnyPart], role: wire.Role, path: str) -> Iterator[wire.MessagePart]:
    for at, part in enumerate(content):
        if not isinstance(part, _OF_ROLE[role]):
            words = f"A message of the {role} has no {part.__struct_config__.tag}"
            raise _wrong(words, f"{path}[{at}].type", "invalid_value")
        match part:
            case DecisionOutputText(text=text):
                yield wire.OutputText(text)
            case DecisionRefusal(refusal=refusal):
                yield wire.Refusal(refusal)
            case _:
                yield input_part(part, f"{path}[{at}]")


def input_part(part: DecisionPart, path: str) -> wire.InputText | wire.InputImage:
    """Return the part at ``path``; JSON becomes its text."""
    match part:
        case DecisionText(text=text):
            return wire.InputText(text)
        case DecisionImage():
            return wire.InputImage(part.image_url, part.detail or "auto")
        case DecisionJson(data=data):
            _check_json(data, f"{path}.data")
            return wire.InputText(json_text(data))


def _check_json(data: Any, path: str) -> None:
    """Raise `InvalidRequest` for JSON beyond the limits of the API."""
    values, level = [data], 0
    count = 0
    while values:
        count, level = count + len(values), level + 1
        inner = [each.values() if isinstance(each, dict) else each for each in values if isinstance(each, dict | list)]
        if inner and level > MOST_JSON_LEVELS:
            raise _wrong(f"This should have at most {MOST_JSON_LEVELS} levels", path, "invalid_value")
        if count > MOST_JSON_VALUES:
            raise _wrong(f"This should have at most {MOST_JSON_VALUES} values", path, "invalid_value")
        values = [value for each in inner for value in each]
    if len(msgspec.json.encode(data)) > MOST_JSON_BYTES:
        raise _wrong(f"This should have at most {MOST_JSON_BYTES} bytes", path, "string_above_max_length")


def _wrong(words: str, param: str, code: str) -> InvalidRequest:
    return InvalidRequest(f"{words} (at {param})", param=param, code=code)
