"""What the events of one item hold to, from the one that adds it to the one that says it is done.

`ItemChecker` is the part of the invariant checker that knows how items of each kind grow: in parts, by deltas that sum
to what the done events carry, under ids and indexes that stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pipeline.protocol.events import (
    ContentPartAdded,
    ContentPartDone,
    CustomToolCallInputDelta,
    CustomToolCallInputDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
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
    TextDelta,
    TextDone,
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

PartEvent: TypeAlias = ContentPartAdded | ContentPartDone | ReasoningSummaryPartAdded | ReasoningSummaryPartDone
InnerEvent: TypeAlias = PartEvent | TextDelta | TextDone | OutputTextAnnotationAdded
"""What comes between the two events of an item."""


class InvariantBroken(AssertionError):
    """A stream broke a rule that clients rely on."""


def rule(holds: bool, text: str) -> None:
    """Raise `InvariantBroken` with the ``text`` of a rule that does not hold."""
    if not holds:
        raise InvariantBroken(text)


@dataclass
class _Text:
    """A text while it grows."""

    deltas: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    has_all_logprobs: bool = True
    done: str | None = None

    def grow(self, event: TextDelta) -> None:
        rule(event.delta != "", "deltas are never empty")
        rule(self.done is None, "no delta follows the done event of its text")
        self.deltas.append(event.delta)
        logprobs = event.logprobs if isinstance(event, OutputTextDelta) else ()
        self.logprobs += logprobs
        self.has_all_logprobs = self.has_all_logprobs and bool(logprobs)

    def close(self, event: TextDone) -> None:
        text = _whole(event)
        rule(self.done is None, "a text is done once")
        rule(text == "".join(self.deltas), "the deltas of a text sum to the text that its done event carries")
        if isinstance(event, OutputTextDone):
            rule(event.logprobs == tuple(self.logprobs), "the logprobs of a text are those of its deltas")
        spelled = b"".join(bytes(token.bytes) for token in self.logprobs).decode(errors="replace")
        # Not to the letter: a stop text may begin inside a token, of which the text then has only the beginning.
        agree = spelled in text or text in spelled
        rule(agree or not self.has_all_logprobs, "the bytes of a text's tokens spell the text")
        self.done = text


@dataclass
class _OpenPart:
    part: OutputPart | SummaryText
    text: _Text = field(default_factory=_Text)
    annotations: list[dict[str, Any]] = field(default_factory=list)


class ItemChecker:
    """The machine: one per item."""

    def __init__(self, added: OutputItemAdded, top_logprobs: int) -> None:
        self._item = added.item
        self._index = added.output_index
        self._top_logprobs = top_logprobs
        self._content: list[OutputPart] = []
        self._summary: list[SummaryText] = []
        self._part: _OpenPart | None = None
        self._input = _Text()
        rule(added.item.status == "in_progress" and _is_empty(added.item), "an item is added empty")

    def feed(self, event: InnerEvent) -> None:
        """Take the next event of the item."""
        self._check_place(event.output_index, event.item_id)
        match event:
            case ContentPartAdded() | ReasoningSummaryPartAdded():
                self._begin_part(event)
            case ContentPartDone() | ReasoningSummaryPartDone():
                self._end_part(event)
            case OutputTextAnnotationAdded():
                self._annotate(event)
            case FunctionCallArgumentsDelta() | CustomToolCallInputDelta():
                self._call(event).grow(event)
            case FunctionCallArgumentsDone() | CustomToolCallInputDone():
                self._call(event).close(event)
            case OutputTextDelta() | RefusalDelta() | ReasoningTextDelta() | ReasoningSummaryTextDelta():
                self._check_logprobs(event)
                self._text(event).grow(event)
            case OutputTextDone() | RefusalDone() | ReasoningTextDone() | ReasoningSummaryTextDone():
                self._text(event).close(event)

    def close(self, done: OutputItemDone) -> OutputItem:
        """Take the last event of the item."""
        item = done.item
        self._check_place(done.output_index, item.id)
        rule(self._part is None, "every part is done before its item")
        rule(bool(self._content) or not isinstance(self._item, Message), "a message has at least one part")
        rule(item.status in ("completed", "incomplete"), "a done item is completed or incomplete")
        rule(_identity(item) == _identity(self._item), "an item keeps its identity")
        rule(_body(item) == self._grown(), "a done item holds what its events built")
        return item

    def _check_place(self, output_index: int, item_id: str) -> None:
        rule(output_index == self._index, "an event carries the output index of the open item")
        rule(item_id == self._item.id, "an event carries the id of the open item")

    def _grown(self) -> object:
        match self._item:
            case FunctionCall() | CustomToolCall():
                return self._input.done
            case Message():
                return tuple(self._content)
            case Reasoning():
                return tuple(self._summary), tuple(self._content)

    # Parts

    def _begin_part(self, event: ContentPartAdded | ReasoningSummaryPartAdded) -> None:
        rule(isinstance(event.part, _part_types(self._item)), "a part is of its item's kind")
        rule(self._part is None, "a part is done before the next is added")
        rule(self._is_next(event), "content indexes count the parts of an item, summary indexes those of its summary")
        rule(event.part == type(event.part)(""), "a part is added empty")
        self._part = _OpenPart(event.part)

    def _end_part(self, event: ContentPartDone | ReasoningSummaryPartDone) -> None:
        opened, part = self._open_part(event), event.part
        rule(type(part) is type(opened.part), "a part keeps its kind")
        rule(opened.text.done is not None and _part_text(part) == opened.text.done, "a done part holds its text")
        if isinstance(part, OutputText):
            rule(part.logprobs == tuple(opened.text.logprobs), "a done part holds its logprobs")
            rule(part.annotations == tuple(opened.annotations), "a done part holds its annotations")
        if isinstance(part, SummaryText):
            self._summary.append(part)
        else:
            self._content.append(part)
        self._part = None

    def _text(self, event: TextDelta | TextDone) -> _Text:
        opened = self._open_part(event)
        rule(isinstance(opened.part, _PART_TYPES[type(event)]), "text events are of their part's kind")
        return opened.text

    def _annotate(self, event: OutputTextAnnotationAdded) -> None:
        opened = self._open_part(event)
        rule(isinstance(opened.part, OutputText), "annotations belong to text for the user")
        rule(opened.text.done is None, "no annotation follows the done event of its text")
        rule(event.annotation_index == len(opened.annotations), "annotation indexes count the annotations of a part")
        opened.annotations.append(event.annotation)

    def _check_logprobs(self, event: TextDelta) -> None:
        for token in event.logprobs if isinstance(event, OutputTextDelta) else ():
            likely = [other.logprob for other in token.top_logprobs]
            rule(likely == sorted(likely, reverse=True), "alternatives come likeliest first")
            rule(len(likely) <= self._top_logprobs, "there are no more alternatives than were asked for")

    def _open_part(self, event: InnerEvent) -> _OpenPart:
        if self._part is None:
            raise InvariantBroken("an event of a part comes between its added and its done event")
        rule(self._is_next(event), "an event carries the index of the open part")
        return self._part

    def _is_next(self, event: Any) -> bool:
        if isinstance(event, _OF_SUMMARIES):
            return event.summary_index == len(self._summary)
        index: int = event.content_index
        return index == len(self._content)

    # Calls

    def _call(self, event: TextDelta | TextDone) -> _Text:
        kind = FunctionCall if isinstance(event, _OF_FUNCTIONS) else CustomToolCall
        rule(isinstance(self._item, kind), "arguments belong to function calls, input to custom ones")
        return self._input


_OF_SUMMARIES = (
    ReasoningSummaryPartAdded,
    ReasoningSummaryPartDone,
    ReasoningSummaryTextDelta,
    ReasoningSummaryTextDone,
)
_OF_FUNCTIONS = (FunctionCallArgumentsDelta, FunctionCallArgumentsDone)
_PART_TYPES: dict[type, type] = {
    OutputTextDelta: OutputText,
    OutputTextDone: OutputText,
    RefusalDelta: Refusal,
    RefusalDone: Refusal,
    ReasoningTextDelta: ReasoningText,
    ReasoningTextDone: ReasoningText,
    ReasoningSummaryTextDelta: SummaryText,
    ReasoningSummaryTextDone: SummaryText,
}
"""The part that each event of a text belongs to."""


def _part_types(item: OutputItem) -> tuple[type, ...]:
    match item:
        case Message():
            return (OutputText, Refusal)
        case Reasoning():
            return (ReasoningText, SummaryText)
        case FunctionCall() | CustomToolCall():
            return ()


def _identity(item: OutputItem) -> tuple[object, ...]:
    match item:
        case Message():
            return "message", item.id, item.role, item.phase
        case Reasoning():
            return "reasoning", item.id
        case FunctionCall():
            return "function_call", item.id, item.call_id, item.name, item.namespace
        case CustomToolCall():
            return "custom_tool_call", item.id, item.call_id, item.name, item.namespace


def _body(item: OutputItem) -> object:
    match item:
        case Message():
            return item.content
        case Reasoning():
            return item.summary, item.content or ()
        case FunctionCall():
            return item.arguments
        case CustomToolCall():
            return item.input


def _is_empty(item: OutputItem) -> bool:
    return _body(item) in ("", (), ((), ()))


def _whole(event: TextDone) -> str:
    match event:
        case RefusalDone():
            return event.refusal
        case FunctionCallArgumentsDone():
            return event.arguments
        case CustomToolCallInputDone():
            return event.input
        case OutputTextDone() | ReasoningTextDone() | ReasoningSummaryTextDone():
            return event.text


def _part_text(part: OutputPart | SummaryText) -> str:
    return part.refusal if isinstance(part, Refusal) else part.text
