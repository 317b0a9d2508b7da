"""Ladders: the sequence of events with which an item of each kind opens, grows and ends on the wire.

One class per kind writes all events of its items, so that an item is always written in the same way.  This module has
the base class, and the ladders of items that hold their text in a part.  The ladders of calls for the client are in
`.calls`, and those of server-side tools in `.served`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from penstock.pipeline.frames import CallFinished, CallStarted, ItemDelta
from penstock.pipeline.protocol.events import (
    ContentPartAdded,
    ContentPartDone,
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
    ResponseEvent,
)
from penstock.pipeline.protocol.items import (
    ItemStatus,
    Logprob,
    Message,
    OutputItem,
    OutputText,
    Phase,
    Reasoning,
    ReasoningText,
    Refusal,
    SummaryText,
)


@dataclass(frozen=True)
class Place:
    """The place of an item in its response: the sequence numbers, the items before it, and the key of its ids."""

    numbers: Iterator[int]
    output: Sequence[OutputItem]
    key: str
    container_id: str
    """The id of the response's sandbox container."""


class OpenItem(ABC):
    """The base class: an item that is being written."""

    prefix: ClassVar[str]

    def __init__(self, place: Place) -> None:
        self._numbers = place.numbers
        self._index = len(place.output)
        self._id = f"{self.prefix}_{place.key}"
        self._text: list[str] = []

    def added(self) -> Iterator[ResponseEvent]:
        """Yield the events that open the item."""
        yield OutputItemAdded(next(self._numbers), self._index, self.item("in_progress"))

    @abstractmethod
    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        """Take more text of the item and return its event, or None if its kind has no delta events."""

    def annotated(self, annotation: dict[str, Any]) -> ResponseEvent:
        """Take an annotation of the item's text and return its event."""
        raise RuntimeError("a note came on what is no text for the user")

    def started(self, frame: CallStarted) -> Iterator[ResponseEvent]:
        """Yield the events for the start of the item's call."""
        raise RuntimeError("what is nothing for the server to run was run")

    def finished(self, frame: CallFinished) -> Iterator[ResponseEvent]:
        """Yield the events for the end of the item's call."""
        raise RuntimeError("what is nothing for the server to run was done")

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Yield the events that close the item."""
        yield OutputItemDone(next(self._numbers), self._index, self.item(status))

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """Return the item in its present state; an item in progress is empty."""

    @property
    def result(self) -> str | None:
        """The call result that the model reads in addition to the item, or None."""
        return None


class _OpenText(OpenItem):
    """An item with its text in one part."""

    delta_type: ClassVar[type[OutputTextDelta | RefusalDelta | ReasoningTextDelta | ReasoningSummaryTextDelta]]
    done_type: ClassVar[type[OutputTextDone | RefusalDone | ReasoningTextDone | ReasoningSummaryTextDone]]

    def added(self) -> Iterator[ResponseEvent]:
        yield from super().added()
        yield self._part_added()

    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        self._text.append(frame.text)
        return self.delta_type(next(self._numbers), self._id, self._index, 0, frame.text)

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        yield self._text_done()
        yield self._part_done()
        yield from super().done(status)

    def _whole(self) -> str:
        """Return the text, joined only once: several closing events hold it, and can then share one string."""
        self._text = ["".join(self._text)]
        return self._text[0]

    @abstractmethod
    def _part_added(self) -> ResponseEvent: ...

    def _text_done(self) -> ResponseEvent:
        return self.done_type(next(self._numbers), self._id, self._index, 0, self._whole())

    @abstractmethod
    def _part_done(self) -> ResponseEvent: ...


class _OpenContent(_OpenText):
    """An item with its part in ``content``."""

    def _part_added(self) -> ResponseEvent:
        return ContentPartAdded(next(self._numbers), self._id, self._index, 0, self._part())

    def _part_done(self) -> ResponseEvent:
        return ContentPartDone(next(self._numbers), self._id, self._index, 0, self._part())

    @abstractmethod
    def _part(self) -> OutputText | Refusal | ReasoningText: ...


class OpenReasoning(_OpenContent):
    """Reasoning, as a ``reasoning_text`` part."""

    prefix = "rs"
    delta_type = ReasoningTextDelta
    done_type = ReasoningTextDone

    def item(self, status: ItemStatus) -> Reasoning:
        """Return the reasoning item."""
        return Reasoning(self._id, content=() if status == "in_progress" else (self._part(),), status=status)

    def _part(self) -> ReasoningText:
        return ReasoningText(self._whole())


class OpenSummary(_OpenText):
    """Reasoning, as a part of the item's summary."""

    prefix = "rs"
    delta_type = ReasoningSummaryTextDelta
    done_type = ReasoningSummaryTextDone

    def item(self, status: ItemStatus) -> Reasoning:
        """Return the reasoning item."""
        return Reasoning(self._id, summary=() if status == "in_progress" else (self._part(),), status=status)

    def _part_added(self) -> ResponseEvent:
        return ReasoningSummaryPartAdded(next(self._numbers), self._id, self._index, 0, self._part())

    def _part_done(self) -> ResponseEvent:
        return ReasoningSummaryPartDone(next(self._numbers), self._id, self._index, 0, self._part())

    def _part(self) -> SummaryText:
        return SummaryText(self._whole())


class OpenMessage(_OpenContent):
    """Text for the user, as an ``output_text`` part."""

    prefix = "msg"

    def __init__(self, place: Place, phase: Phase | None) -> None:
        super().__init__(place)
        self._phase: Phase | UnsetType = phase or UNSET
        self._logprobs: list[Logprob] = []
        self._annotations: list[dict[str, Any]] = []

    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        """Take more text with its logprobs, and return its event."""
        self._text.append(frame.text)
        if frame.logprobs:
            self._logprobs += frame.logprobs
        return OutputTextDelta(next(self._numbers), self._id, self._index, 0, frame.text, frame.logprobs)

    def annotated(self, annotation: dict[str, Any]) -> ResponseEvent:
        """Take an annotation of the text and return its event."""
        self._annotations.append(annotation)
        at = len(self._annotations) - 1
        return OutputTextAnnotationAdded(next(self._numbers), self._id, self._index, 0, at, annotation)

    def item(self, status: ItemStatus) -> Message:
        """Return the message."""
        content = () if status == "in_progress" else (self._part(),)
        return Message(self._id, status, "assistant", content, self._phase)

    def _text_done(self) -> ResponseEvent:
        part = self._part()
        return OutputTextDone(next(self._numbers), self._id, self._index, 0, part.text, part.logprobs)

    def _part(self) -> OutputText:
        return OutputText(self._whole(), tuple(self._annotations), tuple(self._logprobs))


class OpenRefusal(_OpenContent):
    """A message with a ``refusal`` part; it ends the answer, so its phase is always ``final_answer``."""

    prefix = "msg"
    delta_type = RefusalDelta
    done_type = RefusalDone

    def item(self, status: ItemStatus) -> Message:
        """Return the message."""
        content = () if status == "in_progress" else (self._part(),)
        return Message(self._id, status, "assistant", content, "final_answer")

    def _part(self) -> Refusal:
        return Refusal(self._whole())
