"""How a response ends when something breaks: one machine and one shape of a failed response, for whoever has to end it.

`Follower` watches the events of a stream go by, and can end it at any point in keeping with every rule of the wire:
what is open is closed as incomplete, then comes exactly one terminal event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from msgspec.structs import replace

from pipeline.errors import StageError
from pipeline.protocol.events import (
    DELTAS,
    ContentPartAdded,
    ContentPartDone,
    CustomToolCallInputDone,
    Done,
    FunctionCallArgumentsDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextAnnotationAdded,
    OutputTextDelta,
    OutputTextDone,
    ReasoningSummaryPartAdded,
    ReasoningSummaryPartDone,
    ReasoningSummaryTextDone,
    ReasoningTextDone,
    RefusalDone,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    TerminalEvent,
)
from pipeline.protocol.items import (
    CustomToolCall,
    FunctionCall,
    Logprob,
    Message,
    OutputItem,
    OutputPart,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    SummaryText,
)
from pipeline.protocol.response import ErrorDetails, Response

_Part: TypeAlias = OutputPart | SummaryText


def failed_response(response: Response, error: Exception, output: tuple[OutputItem, ...]) -> Response:
    """``response`` as it stands after ``error``; what is no `StageError` is not for the client to read."""
    details = (
        ErrorDetails(error.code, error.message)
        if isinstance(error, StageError)
        else ErrorDetails("server_error", f"Internal error. The server's log names it beside {response.id}.")
    )
    return replace(
        response,
        status="failed",
        error=details,
        output=output,
        completed_at=None,
        incomplete_details=None,
        usage=None,
    )


class Follower:
    """The machine: one per stream."""

    def __init__(self) -> None:
        self.response: Response | None = None
        """The response as it began; None before its first event."""
        self.ended = False
        self._number = -1
        self._output: list[OutputItem] = []
        self._item: OutputItem | None = None
        self._parts: list[_Part] = []
        self._part: _Part | None = None
        self._begin_text()

    def feed(self, event: ResponseEvent) -> None:
        """Take the next event of the stream."""
        self._number = event.sequence_number
        if type(event) is OutputTextDelta:  # nearly every event, so see `DELTAS` for how they are told
            self._text.append(event.delta)
            if event.logprobs:
                self._logprobs += event.logprobs
        elif type(event) in DELTAS:
            delta: Any = event
            self._text.append(delta.delta)
        else:
            self._step(event)

    def fail(self, error: Exception) -> Iterator[ResponseEvent]:
        """The events that end the stream here, because of ``error``; the response must have begun."""
        if self.response is None:
            raise RuntimeError("a response that has not begun cannot end") from error
        if self._item is not None:
            yield from self._close(self._item)
        yield ResponseFailed(self._next(), failed_response(self.response, error, tuple(self._output)))

    def _step(self, event: ResponseEvent) -> None:
        match event:
            case Done():
                self._text_is_done = True
            case OutputItemAdded():
                self._item, self._parts, self._part = event.item, [], None
                self._begin_text()
            case OutputItemDone():
                self._output.append(event.item)
                self._item = None
            case ContentPartAdded() | ReasoningSummaryPartAdded():
                self._part = event.part
                self._begin_text()
            case ContentPartDone() | ReasoningSummaryPartDone():
                self._part = None
                self._parts.append(event.part)
            case OutputTextAnnotationAdded():
                self._annotations.append(event.annotation)
            case ResponseCreated():
                self.response = event.response
            case _:
                self.ended = isinstance(event, TerminalEvent)

    def _begin_text(self) -> None:
        self._text: list[str] = []
        self._logprobs: list[Logprob] = []
        self._annotations: list[dict[str, Any]] = []
        self._text_is_done = False

    # What is open is closed

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _close(self, item: OutputItem) -> Iterator[ResponseEvent]:
        index, text = len(self._output), "".join(self._text)
        match item:
            case FunctionCall():
                if not self._text_is_done:
                    yield FunctionCallArgumentsDone(self._next(), item.id, index, text)
                item = replace(item, arguments=text)
            case CustomToolCall():
                if not self._text_is_done:
                    yield CustomToolCallInputDone(self._next(), item.id, index, text)
                item = replace(item, input=text)
            case Message() | Reasoning():
                yield from self._close_parts(item)
                item = self._filled(item)
        item = replace(item, status="incomplete")
        self._output.append(item)
        yield OutputItemDone(self._next(), index, item)

    def _filled(self, item: Message | Reasoning) -> Message | Reasoning:
        content = tuple(part for part in self._parts if not isinstance(part, SummaryText))
        if isinstance(item, Message):
            return replace(item, content=content)
        summary = tuple(part for part in self._parts if isinstance(part, SummaryText))
        return replace(item, summary=summary, content=content or item.content)

    def _close_parts(self, item: Message | Reasoning) -> Iterator[ResponseEvent]:
        index = len(self._output)
        if isinstance(item, Message) and not self._parts and self._part is None:
            self._part = OutputText("")  # clients take a first part for granted
            yield ContentPartAdded(self._next(), item.id, index, 0, self._part)
        if self._part is None:
            return
        part, at = self._grown(self._part), self._position(self._part)
        if not self._text_is_done:
            yield self._text_done(part, item.id, at)
        if isinstance(part, SummaryText):
            yield ReasoningSummaryPartDone(self._next(), item.id, index, at, part)
        else:
            yield ContentPartDone(self._next(), item.id, index, at, part)
        self._parts.append(part)

    def _position(self, part: _Part) -> int:
        """The index of ``part`` among the summary, or among the content."""
        return sum(isinstance(done, SummaryText) == isinstance(part, SummaryText) for done in self._parts)

    def _grown(self, part: _Part) -> _Part:
        text = "".join(self._text)
        if isinstance(part, OutputText):
            return OutputText(text, tuple(self._annotations), tuple(self._logprobs))
        return type(part)(text)

    def _text_done(self, part: _Part, item_id: str, at: int) -> ResponseEvent:
        index = len(self._output)
        match part:
            case OutputText(text):
                return OutputTextDone(self._next(), item_id, index, at, text, part.logprobs)
            case Refusal(refusal):
                return RefusalDone(self._next(), item_id, index, at, refusal)
            case ReasoningText(text):
                return ReasoningTextDone(self._next(), item_id, index, at, text)
            case SummaryText(text):
                return ReasoningSummaryTextDone(self._next(), item_id, index, at, text)
