"""Rules for every stream of events: a state machine that raises at the first broken rule.

The rules come from the Open Responses specification, as real clients read it.  ``check`` is a pass-through stage: put
it after any stage that writes or rewrites events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
from msgspec.structs import replace

from penstock.pipeline.lifecycle.item_checker import ItemChecker
from penstock.pipeline.lifecycle.order import OUTCOME, StreamOrder
from penstock.pipeline.lifecycle.rules import ITEM_RULES, rule
from penstock.pipeline.protocol import events, items
from penstock.pipeline.protocol.response import Response, ResponseStatus, Usage, tool_usage_of


async def check(source: AsyncIterator[events.ResponseEvent]) -> AsyncGenerator[events.ResponseEvent, None]:
    """Pass events through; raise `InvariantBroken` at the first event that breaks a rule."""
    stream = StreamChecker()
    async for event in source:
        stream.feed(event)
        yield event
    stream.finish()


class StreamChecker:
    """The state machine for one stream."""

    def __init__(self) -> None:
        self._order = StreamOrder()
        self._first: Response | None = None
        self._queued = False
        self._in_progress = False
        self._item: ItemChecker | None = None
        self._output: list[items.OutputItem] = []
        self._cuts: list[bool] = []

    def feed(self, event: events.ResponseEvent) -> None:
        """Take the next event of the stream; raise `InvariantBroken` if it breaks a rule."""
        self._order.feed(event)
        match event:
            case events.ResponseCreated() | events.ResponseQueued() | events.ResponseInProgress():
                self._begin(event)
            case events.ResponseCompleted() | events.ResponseIncomplete() | events.ResponseFailed():
                self._end(event)
            case events.OutputItemAdded():
                self._add(event)
            case events.OutputItemDone():
                self._close(event)
            case _:
                self._open_item().feed(event)

    def finish(self) -> None:
        """End the stream; raise `InvariantBroken` if no terminal event has come."""
        self._order.finish()

    # The response

    def _begin(self, event: events.ResponseCreated | events.ResponseQueued | events.ResponseInProgress) -> None:
        response = event.response
        rule(not any(getattr(response, name) for name in OUTCOME), "a response begins without an outcome")
        match event:
            case events.ResponseCreated():
                rule(response.status in ("queued", "in_progress"), "a response is created queued or in progress")
                self._first = response
            case events.ResponseQueued():
                rule(response.status == "queued", "the response in response.queued is queued")
                rule(self._first == response, "response.queued follows response.created and repeats its response")
                self._queued = True
            case events.ResponseInProgress():
                self._start(response)

    def _start(self, response: Response) -> None:
        first = self._first
        rule(
            first is not None and response == replace(first, status="in_progress"),
            "response.in_progress follows response.created and repeats its response",
        )
        rule(
            first is None or (first.status == "queued") == self._queued,
            "a response that is created queued has response.queued",
        )
        self._in_progress = True

    def _end(self, event: events.TerminalEvent) -> None:
        response = event.response
        rule(
            self._in_progress or response.status in ("failed", "cancelled"),
            "a response is in progress before it ends by itself",
        )
        rule(response.output == tuple(self._output), "the final output equals the items that were done")
        rule(isinstance(event, _TERMINAL_EVENTS.get(response.status, ())), "the terminal event's type is the status")
        rule(not any(self._cuts[:-1]), "only calls and the last item may be incomplete")
        rule(
            response.status != "completed" or not any(self._cuts),
            "a completed response has completed items, or calls that the model left open",
        )
        _check_outcome(response)

    # One item after another

    def _add(self, event: events.OutputItemAdded) -> None:
        rule(event.output_index == len(self._output), "output indexes count the items")
        rule(event.item.id not in {done.id for done in self._output}, "item ids are unique")
        call_ids = {done.call_id for done in self._output if isinstance(done, _CALLS)}
        if isinstance(event.item, _CALLS):
            rule(event.item.call_id not in call_ids, "call ids are unique")
        if isinstance(event.item, items.ShellCallOutput):
            rule(event.item.call_id in call_ids, "an output is that of a call before it")
        self._item = ItemChecker(event, self._first.top_logprobs if self._first else 0)

    def _close(self, event: events.OutputItemDone) -> None:
        item = self._open_item()
        done = item.close(event)
        self._output.append(done)
        may_be_incomplete = done.type.endswith("_call") or ITEM_RULES[type(done)].begins_done
        self._cuts.append(item.is_cut and not may_be_incomplete)  # a model may leave any call open
        self._item = None

    def _open_item(self) -> ItemChecker:
        assert self._item is not None  # `StreamOrder` has seen to it
        return self._item


_CALLS = (
    items.FunctionCall
    | items.CustomToolCall
    | items.LocalShellCall
    | items.ShellCall
    | items.ApplyPatchCall
    | items.Program
)

_TERMINAL_EVENTS: dict[ResponseStatus, type] = {
    "completed": events.ResponseCompleted,
    "incomplete": events.ResponseIncomplete,
    "failed": events.ResponseFailed,
    "cancelled": events.ResponseIncomplete,
}
"""The terminal event for each final status; clients have none for cancelled responses."""


def _check_outcome(response: Response) -> None:
    completed = response.status == "completed"
    rule((response.completed_at is not None) == completed, "completed_at belongs to completed responses")
    has_stopped = response.stop_reason is not msgspec.UNSET
    rule(completed or not has_stopped, "stop_reason belongs to completed responses")
    rule((response.error is not None) == (response.status == "failed"), "error belongs to failed responses")
    rule(
        (response.incomplete_details is not None) == (response.status == "incomplete"),
        "incomplete_details belong to incomplete responses",
    )
    presence = [messages is not msgspec.UNSET for messages in (response.input_messages, response.output_messages)]
    rule(presence[0] == presence[1], "raw messages are those of both sides")
    if response.status not in ("failed", "cancelled"):
        rule(response.usage is not None, "a response that ended by itself has its usage")
    rule(
        response.tool_usage in (msgspec.UNSET, tool_usage_of(response.output)),
        "the usage of tools is that of the output",
    )
    if response.usage:
        _check_usage(response.usage)


def _check_usage(usage: Usage) -> None:
    read, written = usage.input_tokens_details, usage.output_tokens_details
    rule(usage.total_tokens == usage.input_tokens + usage.output_tokens, "the total is the sum of its parts")
    rule(read.cached_tokens <= usage.input_tokens, "cached tokens are input tokens")
    rule(written.reasoning_tokens <= usage.output_tokens, "reasoning tokens are output tokens")
    turns = (
        (read.input_tokens_per_turn, usage.input_tokens),
        (read.cached_tokens_per_turn, read.cached_tokens),
        (written.output_tokens_per_turn, usage.output_tokens),
        (written.tool_output_tokens_per_turn, written.tool_output_tokens),
    )
    given = [(numbers, total) for numbers, total in turns if numbers is not msgspec.UNSET]
    rule(len(given) in (0, len(turns)), "each turn has a number in every list")
    rule(len({len(numbers) for numbers, _ in given}) < 2, "each turn has a number in every list")
    rule(all(sum(numbers) == total for numbers, total in given), "the numbers of the turns add up")
