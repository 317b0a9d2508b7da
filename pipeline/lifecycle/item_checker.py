"""Rules for the events of one item, from ``output_item.added`` to ``output_item.done``.

`ItemChecker` is the part of the invariant checker for the rules that all items share, and for items with content parts:
their deltas add up to the text of their done events, and ids and indexes stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec.structs import replace

from penstock.pipeline.lifecycle.call_checker import CallChecker, call_checker
from penstock.pipeline.lifecycle.rules import ITEM_RULES, InvariantBroken, Text, rule
from penstock.pipeline.protocol import events, items

PartEvent: TypeAlias = (
    events.ContentPartAdded
    | events.ContentPartDone
    | events.ReasoningSummaryPartAdded
    | events.ReasoningSummaryPartDone
)
PartDelta: TypeAlias = (
    events.OutputTextDelta | events.RefusalDelta | events.ReasoningTextDelta | events.ReasoningSummaryTextDelta
)
PartText: TypeAlias = (
    events.OutputTextDone | events.RefusalDone | events.ReasoningTextDone | events.ReasoningSummaryTextDone
)


@dataclass
class _OpenPart:
    part: items.OutputPart | items.SummaryText
    text: Text = field(default_factory=Text)
    annotations: list[dict[str, Any]] = field(default_factory=list)


class ItemChecker:
    """The state machine for one item."""

    def __init__(self, added: events.OutputItemAdded, top_logprobs: int) -> None:
        self._item = added.item
        self._index = added.output_index
        self._top_logprobs = top_logprobs
        self._content: list[items.OutputPart] = []
        self._summary: list[items.SummaryText] = []
        self._part: _OpenPart | None = None
        self.is_cut = False
        """True if the item is done but incomplete."""
        if "status" in added.item.__struct_fields__ and not ITEM_RULES[type(added.item)].begins_done:
            rule(added.item.status == "in_progress", "an item is added in progress")
        self._call = _of_call(added.item)

    def feed(self, event: events.ResponseEvent) -> None:
        """Take the next event of the item."""
        place: Any = event
        self._check_place(place.output_index, getattr(event, "item_id", self._item.id))
        match event:
            case events.ContentPartAdded() | events.ReasoningSummaryPartAdded():
                self._begin_part(event)
            case events.ContentPartDone() | events.ReasoningSummaryPartDone():
                self._end_part(event)
            case events.OutputTextAnnotationAdded():
                self._annotate(event)
            case events.OutputTextDelta():
                self._check_logprobs(event)
                self._text(event).grow(event.delta, event.logprobs)
            case _ if isinstance(event, PartDelta):
                self._text(event).grow(event.delta)
            case _ if isinstance(event, PartText):
                self._end_text(event)
            case _:
                if self._call is None:
                    raise InvariantBroken("events of calls are of their call's kind")
                self._call.feed(event)

    def close(self, done: events.OutputItemDone) -> items.OutputItem:
        """Take the last event of the item; return the finished item."""
        item = done.item
        self._check_place(done.output_index, item.id)
        rule(self._part is None, "every part is done before its item")
        rule(bool(self._content) or not isinstance(self._item, items.Message), "a message has at least one part")
        ends = ("completed", "incomplete", *(("failed", "in_progress") if ITEM_RULES[type(item)].runs else ()))
        rule(item.status in ends, "a done item has ended")
        rule(_identity(item) == _identity(self._item), "an item keeps its identity")
        self.is_cut = self._call.close(item) if self._call else self._close_parts(item)
        return item

    def _close_parts(self, item: items.OutputItem) -> bool:
        rule(_body(item) == self._grown(), "a done item holds what its events built")
        return item.status == "incomplete"

    def _check_place(self, output_index: int, item_id: str) -> None:
        rule(output_index == self._index, "an event carries the output index of the open item")
        rule(item_id == self._item.id, "an event carries the id of the open item")

    def _grown(self) -> object:
        if isinstance(self._item, items.Message):
            return tuple(self._content)
        return tuple(self._summary), tuple(self._content)

    # Parts

    def _begin_part(self, event: events.ContentPartAdded | events.ReasoningSummaryPartAdded) -> None:
        rule(isinstance(event.part, ITEM_RULES[type(self._item)].parts), "a part is of its item's kind")
        rule(self._part is None, "a part is done before the next is added")
        rule(self._is_next(event), "content indexes count the parts of an item, summary indexes those of its summary")
        rule(event.part == type(event.part)(""), "a part is added empty")
        self._part = _OpenPart(event.part)

    def _end_part(self, event: events.ContentPartDone | events.ReasoningSummaryPartDone) -> None:
        opened, part = self._open_part(event), event.part
        rule(type(part) is type(opened.part), "a part keeps its kind")
        rule(opened.text.done is not None and _part_text(part) == opened.text.done, "a done part holds its text")
        if isinstance(part, items.OutputText):
            rule(part.logprobs == tuple(opened.text.logprobs), "a done part holds its logprobs")
            rule(part.annotations == tuple(opened.annotations), "a done part holds its annotations")
        if isinstance(part, items.SummaryText):
            self._summary.append(part)
        else:
            self._content.append(part)
        self._part = None

    def _text(self, event: PartDelta | PartText) -> Text:
        opened = self._open_part(event)
        rule(isinstance(opened.part, _PART_TYPES[type(event)]), "text events are of their part's kind")
        return opened.text

    def _end_text(self, event: PartText) -> None:
        text = self._text(event)
        text.close(event.refusal if isinstance(event, events.RefusalDone) else event.text)
        if isinstance(event, events.OutputTextDone):
            rule(event.logprobs == tuple(text.logprobs), "the logprobs of a text are those of its deltas")

    def _annotate(self, event: events.OutputTextAnnotationAdded) -> None:
        opened = self._open_part(event)
        rule(isinstance(opened.part, items.OutputText), "annotations belong to text for the user")
        rule(opened.text.done is None, "no annotation follows the done event of its text")
        rule(event.annotation_index == len(opened.annotations), "annotation indexes count the annotations of a part")
        opened.annotations.append(event.annotation)

    def _check_logprobs(self, event: events.OutputTextDelta) -> None:
        for token in event.logprobs:
            likely = [other.logprob for other in token.top_logprobs]
            rule(likely == sorted(likely, reverse=True), "alternatives come likeliest first")
            rule(len(likely) <= self._top_logprobs, "there are no more alternatives than the request wants")

    def _open_part(self, event: PartEvent | PartDelta | PartText | events.OutputTextAnnotationAdded) -> _OpenPart:
        if self._part is None:
            raise InvariantBroken("an event of a part comes between its added and its done event")
        rule(self._is_next(event), "an event carries the index of the open part")
        return self._part

    def _is_next(self, event: Any) -> bool:
        if hasattr(event, "summary_index"):
            return bool(event.summary_index == len(self._summary))
        return bool(event.content_index == len(self._content))


_PART_TYPES: dict[type, type] = {
    events.OutputTextDelta: items.OutputText,
    events.OutputTextDone: items.OutputText,
    events.RefusalDelta: items.Refusal,
    events.RefusalDone: items.Refusal,
    events.ReasoningTextDelta: items.ReasoningText,
    events.ReasoningTextDone: items.ReasoningText,
    events.ReasoningSummaryTextDelta: items.SummaryText,
    events.ReasoningSummaryTextDone: items.SummaryText,
}
"""The type of the part for each text event."""


def _of_call(item: items.OutputItem) -> CallChecker | None:
    if not isinstance(item, items.Message | items.Reasoning):
        return call_checker(item)
    rule(_body(item) in ((), ((), ())), "an item is added empty")
    return None


def _identity(item: items.OutputItem) -> items.OutputItem:
    """Return the item with its changing fields reset, so that the added and the finished item compare equal."""
    growing = dict(ITEM_RULES[type(item)].growing)
    if "status" in item.__struct_fields__:
        growing["status"] = "completed"
    return replace(item, **growing)


def _body(item: items.OutputItem) -> object:
    match item:
        case items.Message():
            return item.content
        case items.Reasoning():
            return item.summary, item.content or ()
        case _:
            return None


def _part_text(part: items.OutputPart | items.SummaryText) -> str:
    return part.refusal if isinstance(part, items.Refusal) else part.text
