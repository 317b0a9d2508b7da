"""The ladders: how an item of each kind appears, grows and ends on the wire.

Opening, growing and ending are three methods of one class, and nothing else writes an item's events, so that an item
cannot come out in two ways.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

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
    ResponseEvent,
)
from pipeline.protocol.items import (
    FunctionCall,
    ItemStatus,
    Message,
    OutputItem,
    OutputText,
    Phase,
    Reasoning,
    ReasoningText,
)


@dataclass(frozen=True)
class Place:
    """Where an item stands: the response's sequence numbers, the item's id, and its index in the output."""

    numbers: Iterator[int]
    item_id: str
    output_index: int


class OpenItem(ABC):
    """An item that is being written."""

    def __init__(self, place: Place) -> None:
        self._numbers = place.numbers
        self._id = place.item_id
        self._index = place.output_index
        self._text: list[str] = []

    def added(self) -> Iterator[ResponseEvent]:
        """The events that open the item."""
        yield OutputItemAdded(
            sequence_number=next(self._numbers), output_index=self._index, item=self.item("in_progress")
        )

    @abstractmethod
    def delta(self, text: str) -> ResponseEvent:
        """One more piece of the item's text."""

    @abstractmethod
    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """The events that close the item."""
        yield OutputItemDone(sequence_number=next(self._numbers), output_index=self._index, item=self.item(status))

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """The item as it stands: empty while it is in progress."""


class _OpenText(OpenItem):
    """An item with one content part that holds its text."""

    part_type: ClassVar[type[OutputText | ReasoningText]]
    delta_type: ClassVar[type[OutputTextDelta | ReasoningTextDelta]]
    done_type: ClassVar[type[OutputTextDone | ReasoningTextDone]]

    def added(self) -> Iterator[ResponseEvent]:
        yield from super().added()
        yield ContentPartAdded(
            sequence_number=next(self._numbers),
            item_id=self._id,
            output_index=self._index,
            content_index=0,
            part=self.part_type(""),
        )

    def delta(self, text: str) -> ResponseEvent:
        self._text.append(text)
        return self.delta_type(next(self._numbers), self._id, self._index, 0, text)

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        text = "".join(self._text)
        yield self.done_type(
            sequence_number=next(self._numbers),
            item_id=self._id,
            output_index=self._index,
            content_index=0,
            text=text,
        )
        yield ContentPartDone(
            sequence_number=next(self._numbers),
            item_id=self._id,
            output_index=self._index,
            content_index=0,
            part=self.part_type(text),
        )
        yield from super().done(status)


class OpenReasoning(_OpenText):
    """Thinking, as a ``reasoning_text`` part."""

    part_type = ReasoningText
    delta_type = ReasoningTextDelta
    done_type = ReasoningTextDone

    def item(self, status: ItemStatus) -> Reasoning:
        """The reasoning item."""
        content = () if status == "in_progress" else (ReasoningText("".join(self._text)),)
        return Reasoning(self._id, content=content, status=status)


class OpenMessage(_OpenText):
    """Text for the user, as an ``output_text`` part."""

    part_type = OutputText
    delta_type = OutputTextDelta
    done_type = OutputTextDone

    def __init__(self, place: Place, phase: Phase) -> None:
        super().__init__(place)
        self._phase: Phase = phase

    def item(self, status: ItemStatus) -> Message:
        """The message."""
        content = () if status == "in_progress" else (OutputText("".join(self._text)),)
        return Message(self._id, status, "assistant", content, self._phase)


class OpenFunctionCall(OpenItem):
    """A call, whose text is its arguments."""

    def __init__(self, place: Place, call_id: str, name: str) -> None:
        super().__init__(place)
        self._call_id = call_id
        self._name = name

    def delta(self, text: str) -> ResponseEvent:
        """One more piece of the arguments."""
        self._text.append(text)
        return FunctionCallArgumentsDelta(next(self._numbers), self._id, self._index, text)

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """The events that close the call."""
        yield FunctionCallArgumentsDone(
            sequence_number=next(self._numbers),
            item_id=self._id,
            output_index=self._index,
            arguments="".join(self._text),
        )
        yield from super().done(status)

    def item(self, status: ItemStatus) -> FunctionCall:
        """The call."""
        return FunctionCall(self._id, self._call_id, self._name, "".join(self._text), status)
