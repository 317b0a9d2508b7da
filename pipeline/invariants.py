"""What every stream of events holds to, whoever made it: a machine that raises on the first broken rule.

The rules are those of the Open Responses specification, as real clients read them.  ``check`` is a pass-through stage:
put it behind any stage that writes or rewrites events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

import msgspec

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
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    TerminalEvent,
)
from pipeline.protocol.items import FunctionCall, Message, OutputItem, OutputPart, OutputText, Reasoning, ReasoningText
from pipeline.protocol.response import Response, ResponseStatus


class InvariantBroken(AssertionError):
    """A stream broke a rule that clients rely on."""


async def check(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[ResponseEvent, None]:
    """Pass events through, and raise `InvariantBroken` at the first that breaks a rule."""
    stream = StreamChecker()
    async for event in source:
        stream.feed(event)
        yield event
    stream.finish()


@dataclass
class _OpenPart:
    part: OutputPart
    deltas: list[str] = field(default_factory=list)
    done: str | None = None

    def close(self, text: str) -> None:
        _rule(self.done is None, "a text is done once")
        _rule(text == "".join(self.deltas), "the deltas of a text sum to the text that its done event carries")
        self.done = text


@dataclass
class _OpenItem:
    index: int
    item: OutputItem
    parts: list[OutputPart] = field(default_factory=list)
    open_part: _OpenPart | None = None
    arguments: _OpenPart = field(default_factory=lambda: _OpenPart(OutputText("")))


class StreamChecker:
    """The machine: one per stream."""

    def __init__(self) -> None:
        self._next_number = 0
        self._first: Response | None = None
        self._in_progress = False
        self._open: _OpenItem | None = None
        self._output: list[OutputItem] = []
        self._ended = False

    def feed(self, event: ResponseEvent) -> None:
        """Take the next event of the stream."""
        _rule(event.sequence_number == self._next_number, "sequence numbers count from 0 without gaps")
        self._next_number += 1
        _rule(not self._ended, "nothing follows the terminal event")
        match event:
            case ResponseCreated() | ResponseInProgress():
                self._begin(event)
            case OutputItemAdded() | OutputItemDone():
                self._item(event)
            case ContentPartAdded() | ContentPartDone():
                self._part(event)
            case OutputTextDelta() | OutputTextDone() | ReasoningTextDelta() | ReasoningTextDone():
                self._text(event)
            case FunctionCallArgumentsDelta() | FunctionCallArgumentsDone():
                self._arguments(event)
            case ResponseCompleted() | ResponseIncomplete() | ResponseFailed():
                self._end(event)

    def finish(self) -> None:
        """The stream is over."""
        _rule(self._ended, "a stream ends with a terminal event")

    # The response

    def _begin(self, event: ResponseCreated | ResponseInProgress) -> None:
        response = event.response
        _rule(response.status == "in_progress", "a response that begins is in progress")
        outcome = (response.output, response.usage, response.error, response.completed_at, response.incomplete_details)
        _rule(not any(outcome), "a response begins without an outcome")
        if isinstance(event, ResponseCreated):
            _rule(self._first is None, "response.created comes first, and once")
            self._first = response
        else:
            _rule(self._first == response, "response.in_progress follows response.created and repeats its response")
            _rule(not self._in_progress, "response.in_progress comes once")
            self._in_progress = True

    def _end(self, event: TerminalEvent) -> None:
        response = event.response
        _rule(self._first is not None and self._in_progress, "a response begins before it ends")
        _rule(self._open is None, "every item is done before the response ends")
        _rule(_facts(response) == _facts(self._first), "what the response says of its request never changes")
        _rule(response.output == tuple(self._output), "the final output equals the items that were done")
        _rule(isinstance(event, _TERMINAL_EVENTS.get(response.status, ())), "the terminal event's type is the status")
        self._outcome(response)
        self._ended = True

    def _outcome(self, response: Response) -> None:
        statuses = [item.status for item in response.output]
        _rule("incomplete" not in statuses[:-1], "only the last item may be incomplete")
        completed = response.status == "completed"
        _rule(not (completed and "incomplete" in statuses), "a completed response has completed items only")
        _rule((response.completed_at is not None) == completed, "completed_at belongs to completed responses")
        _rule((response.error is not None) == (response.status == "failed"), "error belongs to failed responses")
        _rule(
            (response.incomplete_details is not None) == (response.status == "incomplete"),
            "incomplete_details belong to incomplete responses",
        )
        if response.status not in ("failed", "cancelled"):
            _rule(response.usage is not None, "a response that ended by itself has its usage")
        if usage := response.usage:
            _rule(usage.total_tokens == usage.input_tokens + usage.output_tokens, "the total is the sum of its parts")
            _rule(
                usage.output_tokens_details.reasoning_tokens <= usage.output_tokens,
                "reasoning tokens are output tokens",
            )

    # One item after another

    def _item(self, event: OutputItemAdded | OutputItemDone) -> None:
        _rule(self._in_progress, "items come after response.in_progress")
        if isinstance(event, OutputItemAdded):
            _rule(self._open is None, "an item is done before the next is added")
            _rule(event.output_index == len(self._output), "output indexes count the items")
            self._check_unique(event.item)
            _rule(event.item.status == "in_progress" and _is_empty(event.item), "an item is added empty")
            self._open = _OpenItem(event.output_index, event.item)
            return
        opened = self._at(event.output_index, event.item.id)
        _rule(opened.open_part is None, "every part is done before its item")
        _rule(bool(opened.parts) or not isinstance(opened.item, Message), "a message has at least one part")
        _rule(event.item.status in ("completed", "incomplete"), "a done item is completed or incomplete")
        _rule(_skeleton(event.item) == _skeleton(opened.item), "an item keeps its identity")
        _rule(_body(event.item) == _grown(opened), "a done item holds what its events built")
        self._output.append(event.item)
        self._open = None

    def _check_unique(self, item: OutputItem) -> None:
        _rule(item.id not in {done.id for done in self._output}, "item ids are unique")
        if isinstance(item, FunctionCall):
            call_ids = {done.call_id for done in self._output if isinstance(done, FunctionCall)}
            _rule(item.call_id not in call_ids, "call ids are unique")

    def _part(self, event: ContentPartAdded | ContentPartDone) -> None:
        opened = self._at(event.output_index, event.item_id)
        _rule(isinstance(event.part, _part_type(opened.item)), "a part is of its item's kind")
        if isinstance(event, ContentPartAdded):
            _rule(opened.open_part is None, "a part is done before the next is added")
            _rule(event.content_index == len(opened.parts), "content indexes count the parts of an item")
            _rule(_part_text(event.part) == "", "a part is added empty")
            opened.open_part = _OpenPart(event.part)
            return
        part = self._open_part(opened, event.content_index)
        _rule(part.done is not None and _part_text(event.part) == part.done, "a done part holds its text")
        opened.parts.append(event.part)
        opened.open_part = None

    def _text(self, event: OutputTextDelta | OutputTextDone | ReasoningTextDelta | ReasoningTextDone) -> None:
        opened = self._at(event.output_index, event.item_id)
        part = self._open_part(opened, event.content_index)
        is_reasoning = isinstance(event, ReasoningTextDelta | ReasoningTextDone)
        _rule(isinstance(part.part, ReasoningText) == is_reasoning, "text events are of their part's kind")
        if isinstance(event, OutputTextDelta | ReasoningTextDelta):
            _grow(part, event.delta)
        else:
            part.close(event.text)

    def _arguments(self, event: FunctionCallArgumentsDelta | FunctionCallArgumentsDone) -> None:
        opened = self._at(event.output_index, event.item_id)
        _rule(isinstance(opened.item, FunctionCall), "arguments belong to function calls")
        if isinstance(event, FunctionCallArgumentsDelta):
            _grow(opened.arguments, event.delta)
        else:
            opened.arguments.close(event.arguments)

    def _at(self, output_index: int, item_id: str) -> _OpenItem:
        opened = self._open
        if opened is None:
            raise InvariantBroken("an event of an item comes between its added and its done event")
        _rule(output_index == opened.index, "an event carries the output index of the open item")
        _rule(item_id == opened.item.id, "an event carries the id of the open item")
        return opened

    def _open_part(self, opened: _OpenItem, content_index: int) -> _OpenPart:
        if opened.open_part is None:
            raise InvariantBroken("a text event comes between its part's added and done events")
        _rule(content_index == len(opened.parts), "an event carries the content index of the open part")
        return opened.open_part


def _rule(holds: bool, rule: str) -> None:
    if not holds:
        raise InvariantBroken(rule)


def _grow(part: _OpenPart, delta: str) -> None:
    _rule(delta != "", "deltas are never empty")
    _rule(part.done is None, "no delta follows the done event of its text")
    part.deltas.append(delta)


_TERMINAL_EVENTS: dict[ResponseStatus, type] = {
    "completed": ResponseCompleted,
    "incomplete": ResponseIncomplete,
    "failed": ResponseFailed,
    "cancelled": ResponseIncomplete,
}
"""What ends a response of each status; clients know no event for cancelled ones."""

_OUTCOME = ("status", "output", "usage", "error", "completed_at", "incomplete_details")


def _facts(response: Response | None) -> dict[str, object]:
    """The fields of a response that its request decides."""
    fields = msgspec.structs.asdict(response) if response else {}
    return {name: value for name, value in fields.items() if name not in _OUTCOME}


def _skeleton(item: OutputItem) -> tuple[object, ...]:
    match item:
        case Message():
            return ("message", item.id, item.role, item.phase)
        case Reasoning():
            return ("reasoning", item.id, item.summary)
        case FunctionCall():
            return ("function_call", item.id, item.call_id, item.name)


def _body(item: OutputItem) -> object:
    return item.arguments if isinstance(item, FunctionCall) else item.content


def _grown(opened: _OpenItem) -> object:
    return opened.arguments.done if isinstance(opened.item, FunctionCall) else tuple(opened.parts)


def _is_empty(item: OutputItem) -> bool:
    return _body(item) in ("", ())


def _part_type(item: OutputItem) -> type | tuple[()]:
    match item:
        case Message():
            return OutputText
        case Reasoning():
            return ReasoningText
        case FunctionCall():
            return ()


def _part_text(part: OutputPart) -> str:
    return part.text if isinstance(part, OutputText | ReasoningText) else part.refusal
