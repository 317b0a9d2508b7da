"""Input items: from what clients write to what a conversation is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET

from pipeline.errors import InvalidRequest
from pipeline.protocol import request
from pipeline.protocol.body import Pace, shortened
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


async def read_input(given: str | list[request.InputItem] | None, suffix: str, pace: Pace) -> tuple[Item, ...]:
    """The items of ``input``; those without an id get one that ends in ``suffix`` and their position."""
    if given is None:
        return ()
    if isinstance(given, str):
        return (Message(f"msg_{suffix}i0000", "completed", "user", (InputText(given),)),)
    items = [
        await _item(item, f"{suffix}i{position:04x}", f"input[{position}]", pace) for position, item in enumerate(given)
    ]
    return tuple(items)


async def check_calls(history: Iterable[Item], items: Iterable[Item], pace: Pace) -> None:
    """Raise `InvalidRequest` for an output whose call comes nowhere before it."""
    called = {item.call_id for item in history if isinstance(item, FunctionCall)}
    for position, item in enumerate(items):
        await pace()
        if isinstance(item, FunctionCall):
            called.add(item.call_id)
        elif isinstance(item, FunctionCallOutput) and item.call_id not in called:
            raise InvalidRequest(
                f"No function call with call_id {shortened(item.call_id)!r} comes before this output.",
                param=f"input[{position}].call_id",
            )


async def _item(item: request.InputItem, suffix: str, path: str, pace: Pace) -> Item:
    await pace()
    match item:
        case request.MessageItem():
            content = await _message_parts(item, path, pace)
            phase = UNSET if item.phase is None else item.phase
            return Message(item.id or f"msg_{suffix}", item.status or "completed", item.role, content, phase)
        case request.ReasoningItem():
            return _reasoning(item, suffix)
        case request.FunctionCallItem():
            return FunctionCall(
                item.id or f"fc_{suffix}", item.call_id, item.name, item.arguments, item.status or "completed"
            )
        case request.FunctionCallOutputItem():
            output = item.output if isinstance(item.output, str) else await _texts(item.output, path, pace)
            return FunctionCallOutput(item.id or f"fco_{suffix}", item.call_id, output, item.status or "completed")


def _reasoning(item: request.ReasoningItem, suffix: str) -> Reasoning:
    return Reasoning(
        item.id or f"rs_{suffix}",
        summary=tuple(SummaryText(part.text) for part in item.summary or ()),
        content=UNSET if item.content is None else tuple(ReasoningText(part.text) for part in item.content),
        encrypted_content=UNSET if item.encrypted_content is None else item.encrypted_content,
        status=UNSET if item.status is None else item.status,
    )


async def _message_parts(item: request.MessageItem, path: str, pace: Pace) -> tuple[MessagePart, ...]:
    if isinstance(item.content, str):
        return (OutputText(item.content) if item.role == "assistant" else InputText(item.content),)
    parts: list[MessagePart] = []
    for position, part in enumerate(item.content):
        await pace()
        match part:
            case request.InputTextPart(text=text):
                parts.append(InputText(text))
            case request.OutputTextPart(text=text):
                parts.append(OutputText(text))
            case request.RefusalPart(refusal=refusal):
                parts.append(Refusal(refusal))
            case request.ImagePart() | request.FilePart():
                raise _not_text(part, f"{path}.content[{position}]")
    return tuple(parts)


async def _texts(given: Sequence[request.OutputPart], path: str, pace: Pace) -> tuple[InputText, ...]:
    parts = []
    for position, part in enumerate(given):
        await pace()
        if not isinstance(part, request.InputTextPart):
            raise _not_text(part, f"{path}.output[{position}]")
        parts.append(InputText(part.text))
    return tuple(parts)


def _not_text(part: request.ImagePart | request.FilePart, path: str) -> InvalidRequest:
    return InvalidRequest(f"This model reads text only, no {part.type}.", param=path)
