"""Stored completions and their messages, as the items of a stored response make them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from penstock.extensions.dialects.chat.chunks import Chunks, completion_id
from penstock.extensions.dialects.chat.completion import (
    Call,
    CalledCustomTool,
    CalledFunction,
    ChatCompletion,
    completion,
)
from penstock.pipeline.protocol import events, items
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.response import Response


class StoredCompletion(ChatCompletion, frozen=True, kw_only=True):
    """A stored completion."""

    metadata: dict[str, str]


class StoredMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a stored completion: a text alone is its ``content``, and all else its parts."""

    id: str
    role: str
    content: str | None
    content_parts: tuple[dict[str, Any], ...] | None
    name: None = None
    refusal: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[Call, ...] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET


async def stored_completion(response: Response, metadata: dict[str, str]) -> StoredCompletion:
    """Return the completion that a response is, as its client got it."""
    whole = await completion(Chunks()(_retold(response)))
    return StoredCompletion(
        id=whole.id,
        created=whole.created,
        model=whole.model,
        choices=whole.choices,
        usage=whole.usage,
        metadata=metadata,
    )


async def _retold(response: Response) -> AsyncGenerator[ResponseEvent, None]:
    """Yield the events of a response that ended, each text in one piece."""
    yield events.ResponseCreated(0, response)
    for index, item in enumerate(response.output):
        yield events.OutputItemAdded(0, index, item)
        for event in _of_item(item, index):
            yield event
    ended = events.ResponseCompleted if response.status == "completed" else events.ResponseIncomplete
    yield ended(0, response)


def _of_item(item: items.OutputItem, index: int) -> Iterator[ResponseEvent]:
    place = (0, item.id, index)
    match item:
        case items.Message(content=content):
            for part in content:
                yield from _of_part(part, place)
        case items.Reasoning(content=content, summary=summary):
            for text in content or summary:
                yield events.ReasoningTextDelta(*place, 0, text.text)
        case items.FunctionCall(arguments=arguments):
            yield events.FunctionCallArgumentsDelta(*place, arguments)
        case items.CustomToolCall(input=given):
            yield events.CustomToolCallInputDelta(*place, given)
        case _:
            pass


def _of_part(part: items.MessagePart, place: tuple[int, str, int]) -> Iterator[ResponseEvent]:
    match part:
        case items.OutputText(text=text, annotations=annotations, logprobs=logprobs):
            yield events.OutputTextDelta(*place, 0, text, logprobs)
            for number, annotation in enumerate(annotations):
                yield events.OutputTextAnnotationAdded(*place, 0, number, annotation)
        case items.Refusal(refusal=refusal):
            yield events.RefusalDelta(*place, 0, refusal)
        case _:
            pass


def stored_messages(response_id: str, read: Sequence[items.Item], positions: Sequence[int]) -> list[StoredMessage]:
    """Return the messages of a completion: each item that the response has read is of the message at its position."""
    placed = zip(read, positions, strict=False)
    return [
        _message(f"{completion_id(response_id)}-{position}", [item for item, _ in group])
        for position, group in groupby(placed, key=lambda pair: pair[1])
    ]


def _message(message_id: str, of_message: Sequence[items.Item]) -> StoredMessage:
    role, calls, thoughts, parts = "assistant", list[Call](), list[str](), list[Any]()
    tool_call_id: str | UnsetType = UNSET
    for item in of_message:
        match item:
            case items.Message():
                role, parts = item.role, [*parts, *item.content]
            case items.Reasoning(content=content):
                thoughts += [thought.text for thought in content or ()]
            case items.FunctionCall(call_id=call_id, name=name, arguments=arguments):
                calls.append(Call(call_id, "function", CalledFunction(name, arguments)))
            case items.CustomToolCall(call_id=call_id, name=name, input=given):
                calls.append(Call(call_id, "custom", custom=CalledCustomTool(name, given)))
            case items.FunctionCallOutput() | items.CustomToolCallOutput():
                role, tool_call_id = "tool", item.call_id
                parts = [items.InputText(item.output)] if isinstance(item.output, str) else list(item.output)
            case _:
                raise TypeError(f"no message of a chat is a {type(item).__name__}")
    refusal = "".join(part.refusal for part in parts if isinstance(part, items.Refusal)) or UNSET
    text, content_parts = _content([part for part in parts if not isinstance(part, items.Refusal)])
    return StoredMessage(
        id=message_id,
        role=role,
        content=text,
        content_parts=content_parts,
        refusal=refusal,
        reasoning="".join(thoughts) or UNSET,
        reasoning_content="".join(thoughts) or UNSET,
        tool_calls=tuple(calls) or UNSET,
        tool_call_id=tool_call_id,
    )


def _content(parts: Sequence[Any]) -> tuple[str | None, tuple[dict[str, Any], ...] | None]:
    match parts:
        case []:
            return None, None
        case [items.InputText(text=text) | items.OutputText(text=text)]:
            return text, None
        case _:
            return None, tuple(map(_part, parts))


def _part(part: Any) -> dict[str, Any]:
    match part:
        case items.InputText(text=text) | items.OutputText(text=text):
            return {"type": "text", "text": text}
        case items.InputImage(image_url=url, detail=detail):
            return {"type": "image_url", "image_url": {"url": url, "detail": detail}}
        case _:
            file = {name: value for name, value in msgspec.structs.asdict(part).items() if value is not UNSET}
            return {"type": "file", "file": file}
