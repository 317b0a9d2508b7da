"""The ladders: how an item of each kind appears, grows and ends on the wire.

Opening, growing and ending are methods of one class, and nothing else writes an item's events, so that an item cannot
come out in two ways.  Here are what all ladders share, and those of items whose text stands in a part; those of calls
for the client are in `.calls`, those of what the server runs itself in `.served`.
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
    """Where an item stands: the response's sequence numbers, the items ahead of it, and a key for its ids."""

    numbers: Iterator[int]
    output: Sequence[OutputItem]
    key: str
    container_id: str
    """The sandbox of the response."""


class OpenItem(ABC):
    """An item that is being written."""

    prefix: ClassVar[str]

    def __init__(self, place: Place) -> None:
        self._numbers = place.numbers
        self._index = len(place.output)
        self._id = f"{self.prefix}_{place.key}"
        self._text: list[str] = []

    def added(self) -> Iterator[ResponseEvent]:
        """The events that open the item."""
        yield OutputItemAdded(next(self._numbers), self._index, self.item("in_progress"))

    @abstractmethod
    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        """One more piece of the item's text."""

    def annotated(self, annotation: dict[str, Any]) -> ResponseEvent:
        """One more note on the item's text."""
        raise RuntimeError("a note came on what is no text for the user")

    def started(self, frame: CallStarted) -> Iterator[ResponseEvent]:
        """What the item asks for runs from now on."""
        raise RuntimeError("what is nothing for the server to run was run")

    def finished(self, frame: CallFinished) -> Iterator[ResponseEvent]:
        """What the item asked for is done."""
        raise RuntimeError("what is nothing for the server to run was done")

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """The events that close the item."""
        yield OutputItemDone(next(self._numbers), self._index, self.item(status))

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """The item as it stands: empty while it is in progress."""

    @property
    def result(self) -> str | None:
        """What the model reads of the item beside itself."""
        return None


class _OpenText(OpenItem):
    """An item with one part that holds its text."""

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
        """The text, joined once: what ends an item tells it several times, and some of that is kept."""
        self._text = ["".join(self._text)]
        return self._text[0]

    @abstractmethod
    def _part_added(self) -> ResponseEvent: ...

    def _text_done(self) -> ResponseEvent:
        return self.done_type(next(self._numbers), self._id, self._index, 0, self._whole())

    @abstractmethod
    def _part_done(self) -> ResponseEvent: ...


class _OpenContent(_OpenText):
    """An item whose part is content."""

    def _part_added(self) -> ResponseEvent:
        return ContentPartAdded(next(self._numbers), self._id, self._index, 0, self._part())

    def _part_done(self) -> ResponseEvent:
        return ContentPartDone(next(self._numbers), self._id, self._index, 0, self._part())

    @abstractmethod
    def _part(self) -> OutputText | Refusal | ReasoningText: ...


class OpenReasoning(_OpenContent):
    """Thinking, as a ``reasoning_text`` part."""

    prefix = "rs"
    delta_type = ReasoningTextDelta
    done_type = ReasoningTextDone

    def item(self, status: ItemStatus) -> Reasoning:
        """The reasoning item."""
        return Reasoning(self._id, content=() if status == "in_progress" else (self._part(),), status=status)

    def _part(self) -> ReasoningText:
        return ReasoningText(self._whole())


class OpenSummary(_OpenText):
    """Thinking, as a part of the item's summary."""

    prefix = "rs"
    delta_type = ReasoningSummaryTextDelta
    done_type = ReasoningSummaryTextDone

    def item(self, status: ItemStatus) -> Reasoning:
        """The reasoning item."""
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
        """One more piece of the text, with its logprobs."""
        self._text.append(frame.text)
        if frame.logprobs:
            self._logprobs += frame.logprobs
        return OutputTextDelta(next(self._numbers), self._id, self._index, 0, frame.text, frame.logprobs)

    def annotated(self, annotation: dict[str, Any]) -> ResponseEvent:
        """One more note on the text."""
        self._annotations.append(annotation)
        at = len(self._annotations) - 1
        return OutputTextAnnotationAdded(next(self._numbers), self._id, self._index, 0, at, annotation)

    def item(self, status: ItemStatus) -> Message:
        """The message."""
        content = () if status == "in_progress" else (self._part(),)
        return Message(self._id, status, "assistant", content, self._phase)

    def _text_done(self) -> ResponseEvent:
        part = self._part()
        return OutputTextDone(next(self._numbers), self._id, self._index, 0, part.text, part.logprobs)

    def _part(self) -> OutputText:
        return OutputText(self._whole(), tuple(self._annotations), tuple(self._logprobs))


class OpenRefusal(_OpenContent):
    """A message that is a ``refusal`` part: the last word on what was asked, so it is a final answer."""

    prefix = "msg"
    delta_type = RefusalDelta
    done_type = RefusalDone

    def item(self, status: ItemStatus) -> Message:
        """The message."""
        content = () if status == "in_progress" else (self._part(),)
        return Message(self._id, status, "assistant", content, "final_answer")

    def _part(self) -> Refusal:
        return Refusal(self._whole())
