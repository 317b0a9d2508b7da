"""The open item of the writer: one class for all types of items, which follows the table of their lifecycles.

An event comes at the moment that the table names, and never before the frame that reports the same step.  At the end of
the item come all events that its final status still requires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from penstock.pipeline.frames import CallFinished, CallStarted, ItemDelta
from penstock.pipeline.lifecycle.item_lifecycles import MOMENTS, PARTS, Moment
from penstock.pipeline.lifecycle.item_state import ItemState
from penstock.pipeline.protocol.events import (
    OutputItemAdded,
    OutputItemDone,
    OutputTextAnnotationAdded,
    OutputTextDelta,
    ResponseEvent,
)
from penstock.pipeline.protocol.items import CallStatus, ItemStatus, OutputItem, OutputText
from penstock.stages.models.output_items import Draft

DeltaWriter: TypeAlias = Callable[[ItemDelta], ResponseEvent | None]


class OpenItem:
    """State machine, one per item; ``numbers`` yields the sequence numbers of the response."""

    __slots__ = ("_held", "_index", "_lifecycle", "_numbers", "_state", "delta", "draft")

    def __init__(self, draft: Draft, numbers: Iterator[int], output_index: int) -> None:
        self.draft = draft
        self._numbers = numbers
        self._index = output_index
        self._lifecycle = draft.lifecycle  # that of `draft` may change when it is settled
        self._state: ItemState | None = None
        self._held: list[str] = []
        self.delta: DeltaWriter = _holding(self._held, draft.written.write)
        """Take more text, and return its event, or None if the item has no deltas or is not added yet."""

    def opened(self) -> Iterator[ResponseEvent]:
        """Yield the events that are due at the first frame of the item."""
        return self._due("opened")

    def annotated(self, annotation: dict[str, Any]) -> ResponseEvent:
        """Take an annotation of the item's text and return its event."""
        if self._state is None or not isinstance(self._state.part, OutputText):
            raise RuntimeError("an annotation came for an item without output text")
        place = self._state.place(self._state.part)
        self.draft.annotations.append(annotation)
        return OutputTextAnnotationAdded(next(self._numbers), *place, len(self.draft.annotations) - 1, annotation)

    def started(self, frame: CallStarted) -> Iterator[ResponseEvent]:
        """Yield the events that are due at the start of the item's call."""
        if not self._lifecycle.runs or self.draft.started is not None:
            raise RuntimeError("a call started that the server does not run, or that runs already")
        self.draft.started = frame
        return self._due("started")

    def finished(self, frame: CallFinished) -> Iterator[ResponseEvent]:
        """Yield the events that are due at the end of the item's call."""
        if self.draft.started is None or self.draft.finished is not None:
            raise RuntimeError("a call finished that does not run")
        self.draft.finished = frame
        if self._state is not None:
            self._state.refresh(self.draft.item("in_progress"))
        return self._due("finished", self.draft.final_status("completed"))

    def closed(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Yield the rest of the item's events."""
        self.draft.settle(complete=status == "completed")
        yield from self._due("closed", self.draft.final_status(status))
        yield OutputItemDone(next(self._numbers), self._index, self.item(status))

    def item(self, status: ItemStatus) -> OutputItem:
        """Return the item as it ends with ``status``, or with the outcome of its call."""
        return self.draft.item(self.draft.final_status(status))

    def _due(self, moment: Moment, status: CallStatus = "completed") -> Iterator[ResponseEvent]:
        """Yield the events that are due; until its call has ended, an item is expected to complete."""
        if self._state is None:
            if MOMENTS.index(moment) < MOMENTS.index(self.draft.lifecycle.added):
                return
            yield from self._add()
        while event := self._next_event(moment, status):
            yield event

    def _next_event(self, moment: Moment, status: CallStatus) -> ResponseEvent | None:
        assert self._state is not None
        event = self._state.next_event(self._numbers, status, self.draft.part or self.draft.text, moment)
        if event is not None:
            self._state.feed(event)
        return event

    def _add(self) -> Iterator[ResponseEvent]:
        lifecycle = self.draft.lifecycle
        if lifecycle.delta or lifecycle.parts:  # its text comes again, in deltas
            self.draft.forget_text()
        item = self.draft.item("in_progress")
        yield OutputItemAdded(next(self._numbers), self._index, item)
        self._state = ItemState(item, self._index)
        if (part := self.draft.part) is not None:
            event = self._state.part_added(self._numbers, part)
            self._state.feed(event)
            yield event
            self.delta = self._delta_writer(self._state, PARTS[type(part)].delta)
        elif lifecycle.delta:
            yield from self._due("opened")
            self.delta = self._delta_writer(self._state, lifecycle.delta)
        else:
            self.delta = _refuse
            return
        for text in self._held:
            if (written := self.delta(ItemDelta(text))) is not None:
                yield written

    def _delta_writer(
        self, state: ItemState, kind: Callable[..., ResponseEvent]
    ) -> Callable[[ItemDelta], ResponseEvent]:
        """Return the function that makes the deltas: a closure, because it runs at every token."""
        write, logprobs, numbers = self.draft.written.write, self.draft.logprobs, self._numbers
        item_id, index = state.item.id, self._index

        def text_delta(frame: ItemDelta) -> ResponseEvent:
            text = frame.text
            write(text)
            if frame.logprobs:
                logprobs.extend(frame.logprobs)
            return OutputTextDelta(next(numbers), item_id, index, 0, delta=text, logprobs=frame.logprobs)

        def part_delta(frame: ItemDelta) -> ResponseEvent:
            text = frame.text
            write(text)
            return kind(next(numbers), item_id, index, 0, text)

        def delta(frame: ItemDelta) -> ResponseEvent:
            text = frame.text
            write(text)
            return kind(next(numbers), item_id, index, text)

        if kind is OutputTextDelta:
            return text_delta
        return part_delta if state.part else delta


def _holding(held: list[str], write: Callable[[str], object]) -> DeltaWriter:
    """Return the function that keeps the texts of an item that is not added yet."""

    def hold(frame: ItemDelta) -> None:
        held.append(frame.text)
        write(frame.text)

    return hold


def _refuse(frame: ItemDelta) -> None:
    raise RuntimeError("text came in an item that has none")
