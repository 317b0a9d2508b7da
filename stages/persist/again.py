"""Again: a stored response becomes a stream once more.

The frames that could have made it go through the machine that writes every stream, with one delta per text; the end is
the stored response itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET
from msgspec.structs import replace

from pipeline.frames import (
    AnnotationAdded,
    CustomToolCallOpened,
    FunctionCallOpened,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    ItemFrame,
    ItemOpened,
    MessageOpened,
    ReasoningOpened,
    RefusalOpened,
)
from pipeline.protocol.events import ResponseCompleted, ResponseEvent, ResponseFailed, ResponseIncomplete, TerminalEvent
from pipeline.protocol.items import CustomToolCall, FunctionCall, Message, OutputItem, OutputText, Reasoning, Refusal
from pipeline.protocol.response import Response
from stages.emit.emit import ResponseWriter


def events_again(response: Response) -> Iterator[ResponseEvent]:
    """The events of a response that has ended."""
    writer, last = ResponseWriter(), -1
    begun = replace(
        response,
        status="in_progress",
        completed_at=None,
        incomplete_details=None,
        error=None,
        output=(),
        usage=None,
        input_messages=UNSET,
        output_messages=UNSET,
    )
    items = (frame for item in response.output for frame in _frames(item))
    for frame in (GenerationStarted(begun, (), prompt_tokens=0), *items):
        for event in writer.feed(frame):
            if not isinstance(event, GenerationStarted):
                last = event.sequence_number
                yield event
    yield _last_event(last + 1, response)


def _last_event(number: int, response: Response) -> TerminalEvent:
    """What the stream of a response that has ended ends with."""
    if response.status == "completed":
        return ResponseCompleted(number, response)
    if response.status == "failed":
        return ResponseFailed(number, response)
    return ResponseIncomplete(number, response)


def _frames(item: OutputItem) -> Iterator[ItemFrame]:
    yield _opening(item)
    yield from _content(item)
    yield ItemClosed(complete=item.status != "incomplete")


def _opening(item: OutputItem) -> ItemOpened:
    match item:
        case Reasoning():
            return ReasoningOpened()
        case FunctionCall():
            return FunctionCallOpened(item.name, item.namespace or None)
        case CustomToolCall():
            return CustomToolCallOpened(item.name, item.namespace or None)
        case Message(content=(Refusal(), *_)):
            return RefusalOpened()
        case Message():
            return MessageOpened(item.phase or "final_answer")


def _content(item: OutputItem) -> Iterator[ItemFrame]:
    """What was in the item: the deltas of empty texts never came."""
    match item:
        case Message(content=(OutputText() as part, *_)):
            if part.text:
                yield ItemDelta(part.text, part.logprobs)
            for annotation in part.annotations:
                yield AnnotationAdded(annotation)
        case _:
            if item.text:
                yield ItemDelta(item.text)
