"""How a response ends when something breaks: one machine and one shape of a failed response, for whoever has to end it.

`Follower` watches the events of a stream go by, and can end it at any point in keeping with every rule of the wire:
what is open is closed as incomplete, then comes exactly one terminal event.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from pipeline.errors import StageError
from pipeline.protocol.events import (
    ContentPartAdded,
    ContentPartDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    TerminalEvent,
)
from pipeline.protocol.items import FunctionCall, OutputItem, OutputPart, OutputText, ReasoningText
from pipeline.protocol.response import ErrorDetails, Response


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
        self._part: OutputPart | None = None
        self._parts: list[OutputPart] = []
        self._text: list[str] = []
        self._text_is_done = False

    def feed(self, event: ResponseEvent) -> None:
        """Take the next event of the stream."""
        self._number = event.sequence_number
        match event:
            case OutputTextDelta() | ReasoningTextDelta() | FunctionCallArgumentsDelta():  # nearly every event
                self._text.append(event.delta)
            case OutputTextDone() | ReasoningTextDone() | FunctionCallArgumentsDone():
                self._text_is_done = True
            case OutputItemAdded():
                self._item, self._parts, self._text, self._text_is_done = event.item, [], [], False
            case OutputItemDone():
                self._output.append(event.item)
                self._item = None
            case ContentPartAdded():
                self._part, self._text, self._text_is_done = event.part, [], False
            case ContentPartDone():
                self._part = None
                self._parts.append(event.part)
            case ResponseCreated():
                self.response = event.response
            case _:
                self.ended = isinstance(event, TerminalEvent)

    def fail(self, error: Exception) -> Iterator[ResponseEvent]:
        """The events that end the stream here, because of ``error``; the response must have begun."""
        if self.response is None:
            raise RuntimeError("a response that has not begun cannot end") from error
        if self._item is not None:
            yield from self._close(self._item)
        yield ResponseFailed(self._next(), failed_response(self.response, error, tuple(self._output)))

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _close(self, item: OutputItem) -> Iterator[ResponseEvent]:
        index, text = len(self._output), "".join(self._text)
        if isinstance(item, FunctionCall):
            if not self._text_is_done:
                yield FunctionCallArgumentsDone(self._next(), item.id, index, text)
            closed: OutputItem = replace(item, arguments=text, status="incomplete")
        else:
            if self._part is not None:
                yield from self._close_part(self._part, item.id, text)
            closed = replace(item, content=tuple(self._parts), status="incomplete")
        self._output.append(closed)
        yield OutputItemDone(self._next(), index, closed)

    def _close_part(self, part: OutputPart, item_id: str, text: str) -> Iterator[ResponseEvent]:
        index, at = len(self._output), len(self._parts)
        if isinstance(part, OutputText | ReasoningText):
            if not self._text_is_done:
                done = OutputTextDone if isinstance(part, OutputText) else ReasoningTextDone
                yield done(self._next(), item_id, index, at, text)
            part = replace(part, text=text)
        self._parts.append(part)
        yield ContentPartDone(self._next(), item_id, index, at, part)
