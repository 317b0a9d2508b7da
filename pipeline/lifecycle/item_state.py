"""The state of the open item of a stream, for all types of items: it follows the table in `item_lifecycles`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.pipeline.lifecycle.item_lifecycles import LIFECYCLES, MOMENTS, PARTS, Moment, Part
from penstock.pipeline.protocol import events, items
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.items import CallStatus, Message, OutputItem, OutputText, SummaryText


class ItemState:
    """State machine: the open item of a stream, as it was added, and the events that are left of its lifecycle."""

    __slots__ = ("_details", "_index", "_milestones", "_output", "_parts", "_text_is_done", "item", "lifecycle", "part")

    def __init__(self, item: OutputItem, output_index: int) -> None:
        self.item = item
        self.lifecycle = LIFECYCLES[type(item)]
        self.part: Part | None = None
        """The open part, empty."""
        self._index = output_index
        self._parts: tuple[Part, ...] = ()  # most items have few, and an empty tuple takes no memory
        self._text_is_done = False
        self._milestones = self.lifecycle.milestones
        self._details = self.lifecycle.details(item)
        self._output: tuple[dict[str, Any], ...] = ()

    def feed(self, event: ResponseEvent) -> None:
        """Take the next event of the item, unless it is a delta of its text."""
        match event:
            case events.ContentPartAdded(part=part) | events.ReasoningSummaryPartAdded(part=part):
                self.part, self._text_is_done = part, False
            case events.ContentPartDone(part=part) | events.ReasoningSummaryPartDone(part=part):
                self.part = None
                self._parts += (part,)
            case events.Done() if self.part is not None:
                self._text_is_done = True
            case events.Done() | events.Progress():
                taken = [at for at, step in enumerate(self._milestones, 1) if type(event) in step.by_status.values()]
                self._milestones = self._milestones[taken[0] :] if taken else self._milestones
            case events.Delta():
                pass
            case _:
                if isinstance(event, events.ShellCallOutputContentDone):
                    self._output += event.output
                self._details = self._details[1:]

    def refresh(self, item: OutputItem) -> None:
        """Take the item after its call: from now on its details are due."""
        self._details = self.lifecycle.details(item)

    def next_event(
        self, numbers: Iterator[int], status: CallStatus, written: str | Part, moment: Moment = "closed"
    ) -> ResponseEvent | None:
        """Return the next event that is due at ``moment`` in an item that ends with ``status``; None if there is none.

        ``written`` is the text of the item so far, or its open part.  Only ``output_item.done`` is left out.
        """
        if self._details:
            kind, fields = self._details[0]
            has_id = "item_id" in kind.__struct_fields__
            return _event(kind, next(numbers), *((self.item.id,) if has_id else ()), self._index, *fields)
        for milestone in self._milestones:
            if MOMENTS.index(milestone.due) > MOMENTS.index(moment):
                return None
            if status in milestone.by_status:
                kind = milestone.by_status[status]
                text = (written,) if issubclass(kind, events.Done) else ()
                return _event(kind, next(numbers), self.item.id, self._index, *text)
        return self._part_end(numbers, written) if moment == "closed" else None

    def part_added(self, numbers: Iterator[int], part: Part) -> ResponseEvent:
        """Return the event that adds a part."""
        return _event(PARTS[type(part)].added, next(numbers), *self.place(part), part)

    def place(self, part: Part) -> tuple[str, int, int]:
        """Return the place of the events of ``part``: the last number counts the summary parts or the content parts."""
        is_summary = isinstance(part, SummaryText)
        position = sum(isinstance(done, SummaryText) == is_summary for done in self._parts)
        return self.item.id, self._index, position

    def ended(self, status: CallStatus, text: str) -> OutputItem:
        """Return the item as its events built it, with ``status`` and ``text``, without the result of its call."""
        changes: dict[str, Any] = {"status": status} if "status" in self.item.__struct_fields__ else {}
        if self.lifecycle.parts:
            changes |= _by_field(self.item, self._parts)
        if self.lifecycle.text_field:
            changes[self.lifecycle.text_field] = text
        if isinstance(self.item, items.ShellCallOutput):
            changes["output"] = self._output
        if status != "completed":
            missing = {name: value for name, value in self.lifecycle.cut_fields.items() if not getattr(self.item, name)}
            changes |= missing
        return replace(self.item, **changes)

    def _part_end(self, numbers: Iterator[int], written: str | Part) -> ResponseEvent | None:
        if self.part is None:
            is_bare = self.lifecycle.needs_part and not self._parts
            return self.part_added(numbers, self.lifecycle.parts[0]) if is_bare else None
        assert not isinstance(written, str)
        place = (next(numbers), *self.place(written))
        kinds = PARTS[type(written)]
        if self._text_is_done:
            return _event(kinds.done, *place, written)
        logprobs = (written.logprobs,) if isinstance(written, OutputText) else ()
        return _event(kinds.text_done, *place, text_of(written), *logprobs)


def text_of(part: Part) -> str:
    """Return the text of a part."""
    return part.refusal if isinstance(part, items.Refusal) else part.text


def _by_field(item: OutputItem, parts: Sequence[Part]) -> dict[str, tuple[Part, ...]]:
    content: tuple[Part, ...] = tuple(part for part in parts if not isinstance(part, SummaryText))
    if isinstance(item, Message):
        return {"content": content}
    fields: dict[str, tuple[Part, ...]] = {"summary": tuple(part for part in parts if isinstance(part, SummaryText))}
    return fields | ({"content": content} if content else {})


def _event(kind: Any, *fields: object) -> ResponseEvent:
    event: ResponseEvent = kind(*fields)
    return event
