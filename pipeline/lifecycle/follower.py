"""Follow the state of a stream of events, list the events that may come next, and close the stream early.

`Follower` takes the events of a stream one by one.  The event log stores the index of an event in the list.  After a
failure or a cancellation, `Follower` ends the stream without breaking a rule of the protocol: it closes an open item
as incomplete, then comes exactly one terminal event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import replace

from penstock.pipeline.lifecycle.ladders import CallFollower
from penstock.pipeline.lifecycle.outcome import begun, cancelled_response, failed_response, last_event
from penstock.pipeline.protocol.events import (
    DELTAS,
    CodeInterpreterCallCodeDelta,
    ContentPartAdded,
    ContentPartDone,
    CustomToolCallInputDelta,
    Done,
    FunctionCallArgumentsDelta,
    McpCallArgumentsDelta,
    OutputItemAdded,
    OutputItemDone,
    OutputTextAnnotationAdded,
    OutputTextDelta,
    OutputTextDone,
    ReasoningSummaryPartAdded,
    ReasoningSummaryPartDone,
    ReasoningSummaryTextDelta,
    ReasoningSummaryTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    RefusalDelta,
    RefusalDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
    TextDelta,
)
from penstock.pipeline.protocol.items import (
    CallStatus,
    CodeInterpreterCall,
    CustomToolCall,
    FunctionCall,
    Logprob,
    McpCall,
    Message,
    OutputItem,
    OutputPart,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    SummaryText,
    WebSearchCall,
)
from penstock.pipeline.protocol.response import Response

_Part: TypeAlias = OutputPart | SummaryText


class Follower:
    """The state machine for one stream."""

    def __init__(self) -> None:
        self.response: Response | None = None
        """The response at its start; None before its first event."""
        self.ended = False
        self.number = -1
        """The sequence number of the last event; -1 before the first."""
        self._output: list[OutputItem] = []
        self._item: OutputItem | None = None
        self._call: CallFollower | None = None
        self._parts: list[_Part] = []
        self._part: _Part | None = None
        self._growth: _Growth | None = None
        self._begin_text()

    def feed(self, event: ResponseEvent) -> None:
        """Take the next event of the stream."""
        self.number = event.sequence_number
        if type(event) is OutputTextDelta:  # nearly every event; `DELTAS` explains why not isinstance
            self._text.write(event.delta)
            if event.logprobs:
                self._logprobs += event.logprobs
        elif type(event) in DELTAS:
            delta: Any = event
            self._text.write(delta.delta)
        else:
            self._step(event)

    def end(self, error: Exception | None) -> Iterator[ResponseEvent]:
        """Yield the events that end the stream here, each from `ending`, and take them as well."""
        while not self.ended:
            event = self.ending(error)
            self.feed(event)
            yield event

    # The next event

    def ending(self, error: Exception | None) -> ResponseEvent:
        """Return the next event of an early end: the response fails with ``error``, or is cancelled if that is None."""
        if self.response is None:
            raise RuntimeError("a response that has not begun cannot end") from error
        if self._item is not None:
            return self._closing(self._item, "incomplete")
        output = tuple(self._output)
        if error is None:
            return last_event(self._next, cancelled_response(self.response, output))
        return last_event(self._next, failed_response(self.response, error, output))

    def guesses(self, final: Response) -> Iterator[ResponseEvent]:
        """Yield the events that may come next, except deltas and new items, in a response that ends as ``final``.

        Stored logs refer to a guess by its position, so the order of the guesses must not change.
        """
        if self._item is not None:
            for status in _STATUSES.get(type(self._item), ("completed", "incomplete")):
                yield self._closing(self._item, status)
            for part in _FIRST_PARTS.get(type(self._item), ()):
                yield self._part_added(self._item, part)
        elif self.response is None:
            yield ResponseCreated(self._next, begun(final))
        else:
            yield last_event(self._next, final)
            yield ResponseQueued(self._next, self.response)
            yield ResponseInProgress(self._next, replace(self.response, status="in_progress"))

    # Deltas, many at once

    def deltas(self, texts: Sequence[str], logprobs: tuple[Logprob, ...] = ()) -> list[ResponseEvent]:
        """Return delta events for ``texts``; empty without an open text, or with ``logprobs`` that it cannot have."""
        if self._growth is None or (logprobs and self._growth.kind is not OutputTextDelta):
            return []
        kind, place, _ = self._growth
        rest = (logprobs,) if logprobs else ()
        return [kind(number, *place, text, *rest) for number, text in enumerate(texts, self._next)]

    def growth(self, events: Sequence[ResponseEvent], at: int) -> list[str]:
        """Take the run of deltas in ``events`` that begins at position ``at``, and return their texts.

        The run ends before the first event that `deltas` would not rebuild from its text alone.  The fields are
        compared in one loop, because building events only to compare them takes twice as long.
        """
        texts: list[str] = []
        if self._growth is None:
            return texts
        kind, (item_id, output_index, *rest), position = self._growth
        index, may_have_logprobs = rest[0] if rest else output_index, kind is OutputTextDelta
        following: Iterator[Any] = islice(events, at, None)
        for number, event in enumerate(following, self._next):
            if (
                type(event) is not kind
                or event.sequence_number != number
                or event.item_id != item_id
                or event.output_index != output_index
                or position(event) != index
                or (may_have_logprobs and event.logprobs)
            ):
                break
            texts.append(event.delta)
        self.take(texts)
        return texts

    def take(self, texts: Sequence[str]) -> None:
        """Take the `deltas` of these texts as the next events."""
        self._text.write("".join(texts))
        self.number += len(texts)

    @property
    def _next(self) -> int:
        return self.number + 1

    def _step(self, event: ResponseEvent) -> None:
        match event:
            case OutputItemAdded():
                self._item, self._parts, self._part = event.item, [], None
                self._call = None if isinstance(event.item, Message | Reasoning) else CallFollower(event.item)
                self._begin_text(_CALL_DELTAS.get(type(event.item)), event.item.id)
            case OutputItemDone():
                self._output.append(event.item)
                self._item, self._call, self._growth = None, None, None
            case ContentPartAdded() | ReasoningSummaryPartAdded():
                self._part = event.part
                self._begin_text(_PART_DELTAS[type(event.part)], event.item_id, self._position(event.part))
            case ContentPartDone() | ReasoningSummaryPartDone():
                self._part, self._growth = None, None
                self._parts.append(event.part)
            case OutputTextAnnotationAdded():
                self._annotations.append(event.annotation)
            case ResponseCreated():
                self.response = event.response
            case ResponseCompleted() | ResponseIncomplete() | ResponseFailed():
                self.ended = True
            case _ if self._call:
                self._call.feed(event)
            case Done():
                self._text_is_done = True
            case _:
                pass

    def _begin_text(self, delta: type[TextDelta] | None = None, item_id: str = "", *at: int) -> None:
        self._text = StringIO()
        self._logprobs: list[Logprob] = []
        self._annotations: list[dict[str, Any]] = []
        self._text_is_done = False
        self._growth = _growth(delta, item_id, len(self._output), *at) if delta else None

    # Closing the open item

    def _closing(self, item: OutputItem, status: CallStatus) -> ResponseEvent:
        """Return the next event on the way to the end of the open item, which ends with ``status``."""
        if not isinstance(item, Message | Reasoning):
            call = self._call or CallFollower(item)
            return call.closing(self._next, len(self._output), self._text.getvalue(), status)
        if self._part is not None:
            part = self._grown(self._part)
            return self._part_done(item, part) if self._text_is_done else self._text_done(item, part)
        if isinstance(item, Message) and not self._parts:
            return self._part_added(item, OutputText(""))  # clients expect every message to have a part
        return OutputItemDone(self._next, len(self._output), replace(self._filled(item), status=status))

    def _filled(self, item: Message | Reasoning) -> Message | Reasoning:
        content = tuple(part for part in self._parts if not isinstance(part, SummaryText))
        if isinstance(item, Message):
            return replace(item, content=content)
        summary = tuple(part for part in self._parts if isinstance(part, SummaryText))
        return replace(item, summary=summary, content=content or item.content)

    def _position(self, part: _Part) -> int:
        """Return the index of ``part`` among the summary parts or the content parts of its item."""
        return sum(isinstance(done, SummaryText) == isinstance(part, SummaryText) for done in self._parts)

    def _grown(self, part: _Part) -> _Part:
        text = self._text.getvalue()
        if isinstance(part, OutputText):
            return OutputText(text, tuple(self._annotations), tuple(self._logprobs))
        return type(part)(text)

    def _part_added(self, item: OutputItem, part: _Part) -> ResponseEvent:
        place = (self._next, item.id, len(self._output), self._position(part))
        if isinstance(part, SummaryText):
            return ReasoningSummaryPartAdded(*place, part)
        return ContentPartAdded(*place, part)

    def _part_done(self, item: OutputItem, part: _Part) -> ResponseEvent:
        place = (self._next, item.id, len(self._output), self._position(part))
        if isinstance(part, SummaryText):
            return ReasoningSummaryPartDone(*place, part)
        return ContentPartDone(*place, part)

    def _text_done(self, item: OutputItem, part: _Part) -> ResponseEvent:
        place = (self._next, item.id, len(self._output), self._position(part))
        match part:
            case OutputText(text):
                return OutputTextDone(*place, text, part.logprobs)
            case Refusal(refusal):
                return RefusalDone(*place, refusal)
            case ReasoningText(text):
                return ReasoningTextDone(*place, text)
            case SummaryText(text):
                return ReasoningSummaryTextDone(*place, text)


class _Growth(NamedTuple):
    """The deltas of the open text: their type, their place, and a getter for the last index of the place."""

    kind: Any
    place: tuple[Any, ...]
    position: Callable[[Any], int]


def _growth(kind: type[TextDelta], *place: str | int) -> _Growth:
    return _Growth(kind, place, attrgetter(kind.__struct_fields__[len(place)]))


_FIRST_PARTS: dict[type[OutputItem], tuple[_Part, ...]] = {
    Message: (OutputText(""), Refusal("")),
    Reasoning: (ReasoningText(""), SummaryText("")),
}
_PART_DELTAS: dict[type[_Part], type[TextDelta]] = {
    OutputText: OutputTextDelta,
    Refusal: RefusalDelta,
    ReasoningText: ReasoningTextDelta,
    SummaryText: ReasoningSummaryTextDelta,
}
_CALL_DELTAS: dict[type[OutputItem], type[TextDelta]] = {
    FunctionCall: FunctionCallArgumentsDelta,
    CustomToolCall: CustomToolCallInputDelta,
    McpCall: McpCallArgumentsDelta,
    CodeInterpreterCall: CodeInterpreterCallCodeDelta,
}
_ANY: tuple[CallStatus, ...] = ("completed", "incomplete", "failed")
_STATUSES: dict[type[OutputItem], tuple[CallStatus, ...]] = dict.fromkeys(
    (McpCall, CodeInterpreterCall, WebSearchCall), _ANY
)
