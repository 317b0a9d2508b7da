"""The state of a stream of events: what may come next, and how the stream can end early.

The event log stores the position of an event among those that `StreamState.predict` yields.  After a failure or a
cancellation, `StreamState` ends the stream without breaking a rule of the protocol: it closes an open item as
incomplete, then comes exactly one terminal event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from itertools import count, islice
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.pipeline.lifecycle.item_lifecycles import PARTS, Part
from penstock.pipeline.lifecycle.item_state import ItemState
from penstock.pipeline.lifecycle.outcome import begun, cancelled_response, failed_response, last_event
from penstock.pipeline.protocol import events
from penstock.pipeline.protocol.events import OutputItemDone, OutputTextDelta, ResponseEvent, TextDelta
from penstock.pipeline.protocol.generations import Generation
from penstock.pipeline.protocol.items import CallStatus, Logprob, OutputItem, OutputText
from penstock.pipeline.protocol.response import Response, Usage


class StreamState:
    """State machine, one per stream."""

    __slots__ = (
        "_annotations",
        "_delta",
        "_item",
        "_logprobs",
        "_output",
        "_run",
        "_text",
        "ended",
        "number",
        "response",
    )

    def __init__(self) -> None:
        self.response: Response | None = None
        """The response at its start; None before its first event."""
        self.ended = False
        self.number = -1
        """The sequence number of the last event; -1 before the first."""
        self._output: list[OutputItem] = []
        self._item: ItemState | None = None
        self._run: TextRun | None = None
        self._begin_text()

    def feed(self, event: ResponseEvent) -> None:
        """Take the next event of the stream."""
        self.number = event.sequence_number
        if type(event) is OutputTextDelta:  # nearly every event, and isinstance takes five times as long
            self._text.write(event.delta)
            if event.logprobs:
                self._logprobs += event.logprobs
        elif type(event) is self._delta:
            delta: Any = event
            self._text.write(delta.delta)
        else:
            self._advance(event)

    # The next event

    def ending(
        self,
        error: Exception | None,
        usage: Usage | None = None,
        generations: tuple[Generation, ...] | UnsetType = UNSET,
    ) -> ResponseEvent:
        """Return the next event of an early end.

        The response fails with ``error``, or is cancelled if that is None, and has this ``usage`` and ``generations``.
        """
        if self.response is None:
            raise RuntimeError("a response that has not begun cannot end") from error
        if self._item is not None:
            return self._closing(self._item, "incomplete")
        output, response = tuple(self._output), replace(self.response, generations=generations)
        if error is None:
            return last_event(self._next, cancelled_response(response, output, usage))
        return last_event(self._next, failed_response(response, error, output))

    def end(self, error: Exception | None) -> Iterator[ResponseEvent]:
        """Yield the events that end the stream here, each from `ending`, and take them as well."""
        while not self.ended:
            event = self.ending(error)
            self.feed(event)
            yield event

    def predict(self, final: Response) -> Iterator[ResponseEvent]:
        """Yield the events that may come next, except deltas and new items, in a response that ends as ``final``.

        Stored logs refer to a prediction by its position, so the order of the predictions must not change.
        """
        if self._item is not None:
            for status in self._item.lifecycle.statuses:
                yield self._closing(self._item, status)
            for part in self._item.lifecycle.parts:
                yield self._item.part_added(count(self._next), part)
        elif self.response is None:
            yield events.ResponseCreated(self._next, begun(final))
        else:
            yield last_event(self._next, final)
            yield events.ResponseQueued(self._next, self.response)
            yield events.ResponseInProgress(self._next, replace(self.response, status="in_progress"))

    # Runs of deltas

    def deltas(self, texts: Sequence[str], logprobs: tuple[Logprob, ...] = ()) -> list[ResponseEvent]:
        """Return delta events for ``texts``; empty without an open text, or with ``logprobs`` that it cannot have."""
        if self._run is None or (logprobs and self._run.kind is not OutputTextDelta):
            return []
        kind, place, _ = self._run
        rest = (logprobs,) if logprobs else ()
        return [kind(number, *place, text, *rest) for number, text in enumerate(texts, self._next)]

    def take_run(self, following: Sequence[ResponseEvent], at: int) -> list[str]:
        """Take the run of deltas in ``following`` that begins at position ``at``, and return their texts.

        The run ends before the first event that `deltas` would not rebuild from its text alone.  The fields are
        compared in one loop, because building events only to compare them takes twice as long.
        """
        texts: list[str] = []
        if self._run is None:
            return texts
        kind, (item_id, output_index, *rest), position = self._run
        index, may_have_logprobs = rest[0] if rest else output_index, kind is OutputTextDelta
        run: Iterator[Any] = islice(following, at, None)
        for number, event in enumerate(run, self._next):
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

    def _advance(self, event: ResponseEvent) -> None:
        match event:
            case events.OutputItemAdded(item=item):
                self._item = ItemState(item, len(self._output))
                self._begin_text(self._item.lifecycle.delta, item.id, len(self._output))
            case OutputItemDone():
                self._output.append(event.item)
                self._item = self._run = None
            case events.ResponseCreated():
                self.response = event.response
            case events.ResponseCompleted() | events.ResponseIncomplete() | events.ResponseFailed():
                self.ended = True
            case events.OutputTextAnnotationAdded():
                self._annotations.append(event.annotation)
            case _ if self._item is not None:
                self._item.feed(event)
                if isinstance(event, events.ContentPartAdded | events.ReasoningSummaryPartAdded):
                    self._begin_text(PARTS[type(event.part)].delta, *self._item.place(event.part))
                elif isinstance(event, events.ContentPartDone | events.ReasoningSummaryPartDone):
                    self._run = None
            case _:
                pass

    def _begin_text(self, delta: type[TextDelta] | None = None, *place: str | int) -> None:
        self._delta = delta
        self._text = StringIO()
        self._logprobs: list[Logprob] = []
        self._annotations: list[dict[str, Any]] = []
        self._run = TextRun(delta, place, attrgetter(delta.__struct_fields__[len(place)])) if delta else None

    def _closing(self, item: ItemState, status: CallStatus) -> ResponseEvent:
        """Return the next event on the way to the end of the open item, which ends with ``status``."""
        text = self._text.getvalue()
        event = item.next_event(count(self._next), status, self._part(item.part, text) if item.part else text)
        return event or OutputItemDone(self._next, len(self._output), item.ended(status, text))

    def _part(self, part: Part, text: str) -> Part:
        if isinstance(part, OutputText):
            return OutputText(text, tuple(self._annotations), tuple(self._logprobs))
        return type(part)(text)


class TextRun(NamedTuple):
    """The deltas of the open text: their type, their place, and a getter for the last index of the place."""

    kind: Any
    place: tuple[Any, ...]
    position: Callable[[Any], int]
