"""Input items: from what clients write to what a conversation is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import UNSET

from pipeline.errors import InvalidRequest
from pipeline.protocol import request
from pipeline.protocol.items import (
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    Message,
    MessagePart,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    SummaryText,
)


def read_input(given: str | list[request.InputItem] | None, suffix: str) -> tuple[Item, ...]:
    """The items of ``input``; those without an id get one that ends in ``suffix`` and their position."""
    if given is None:
        return ()
    if isinstance(given, str):
        return (Message(f"msg_{suffix}i0000", "completed", "user", (InputText(given),)),)
    return tuple(_item(item, f"{suffix}i{position:04x}", f"input[{position}]") for position, item in enumerate(given))


def check_calls(history: Iterable[Item], items: Iterable[Item]) -> None:
    """Raise `InvalidRequest` for an output whose call comes nowhere before it."""
    called = {item.call_id for item in history if isinstance(item, FunctionCall)}
    for position, item in enumerate(items):
        if isinstance(item, FunctionCall):
            called.add(item.call_id)
        elif isinstance(item, FunctionCallOutput) and item.call_id not in called:
            raise InvalidRequest(
                f"No function call with call_id {item.call_id!r} comes before this output.",
                param=f"input[{position}].call_id",
            )


def _item(item: request.InputItem, suffix: str, path: str) -> Item:
    match item:
        case request.MessageItem():
            content = tuple(_message_parts(item, path))
            phase = UNSET if item.phase is None else item.phase
            return Message(item.id or f"msg_{suffix}", item.status or "completed", item.role, content, phase)
        case request.ReasoningItem():
            return _reasoning(item, suffix)
        case request.FunctionCallItem():
            return FunctionCall(
                item.id or f"fc_{suffix}", item.call_id, item.name, item.arguments, item.status or "completed"
            )
        case request.FunctionCallOutputItem():
            output = item.output if isinstance(item.output, str) else tuple(_texts(item.output, f"{path}.output"))
            return FunctionCallOutput(item.id or f"fco_{suffix}", item.call_id, output, item.status or "completed")


def _reasoning(item: request.ReasoningItem, suffix: str) -> Reasoning:
    return Reasoning(
        item.id or f"rs_{suffix}",
        summary=tuple(SummaryText(part.text) for part in item.summary),
        content=UNSET if item.content is None else tuple(ReasoningText(part.text) for part in item.content),
        encrypted_content=UNSET if item.encrypted_content is None else item.encrypted_content,
        status=UNSET if item.status is None else item.status,
    )


def _message_parts(item: request.MessageItem, path: str) -> Iterator[MessagePart]:
    if isinstance(item.content, str):
        yield OutputText(item.content) if item.role == "assistant" else InputText(item.content)
        return
    for position, part in enumerate(item.content):
        match part:
            case request.InputTextPart(text=text):
                yield InputText(text)
            case request.OutputTextPart(text=text):
                yield OutputText(text)
            case request.RefusalPart(refusal=refusal):
                yield Refusal(refusal)
            case request.ImagePart() | request.FilePart():
                raise _not_text(part, f"{path}.content[{position}]")


def _texts(parts: list[request.OutputPart], path: str) -> Iterator[InputText]:
    for position, part in enumerate(parts):
        if not isinstance(part, request.InputTextPart):
            raise _not_text(part, f"{path}[{position}]")
        yield InputText(part.text)


def _not_text(part: request.ImagePart | request.FilePart, path: str) -> InvalidRequest:
    return InvalidRequest(f"This model reads text only, no {part.type}.", param=path)
