"""Conversations as gpt-oss reads them: a list of Harmony messages, laid out as a pure function of the conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, takewhile

from msgspec import UNSET

from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol.items import (
    Call,
    CallItem,
    CallOutput,
    CustomToolCall,
    FormCall,
    HostedCall,
    Item,
    McpApprovalRequest,
    McpApprovalResponse,
    Message,
    Reasoning,
    ServedCall,
    ShellCall,
    WebSearchCall,
)
from penstock.stages.models.call_pairs import callers_of
from penstock.stages.models.harmony.vocabulary import FUNCTIONS, recipient_of
from penstock.stages.render.call_texts import arguments_of, is_leading, output_of, refusal_of, result_of
from penstock.stages.render.harmony.head import head
from penstock.stages.render.harmony.message import Channel, HarmonyMessage


@dataclass(frozen=True)
class Layout:
    """A whole prompt: its head, then the items, with the messages of each item in ``spoken`` (there may be none)."""

    head: tuple[HarmonyMessage, ...]
    items: tuple[Item, ...]
    spoken: tuple[tuple[HarmonyMessage, ...], ...]

    @property
    def messages(self) -> tuple[HarmonyMessage, ...]:
        """The messages of all items."""
        return tuple(chain.from_iterable(self.spoken))


def lay_out(request: ResolvedRequest) -> Layout:
    """Lay out the messages of the prompt, without the beginning of the message that the model will write."""
    items = request.items
    leading = tuple(takewhile(is_leading, items))
    rest = items[len(leading) :]
    return Layout(tuple(head(request, leading)), rest, tuple(_Items(rest, request.results).spoken()))


class _Items:
    """The items after the head.  The messages of each item depend on the other items."""

    def __init__(self, items: tuple[Item, ...], results: Mapping[str, str]) -> None:
        self._items = items
        self._results = results
        self._callers = callers_of(items)
        self._run = frozenset(self._callers.values())
        self._answers = _answers(items)
        self._answered = max(self._answers, default=0)
        self._refusals = {
            item.approval_request_id: item
            for item in items
            if isinstance(item, McpApprovalResponse) and not item.approve
        }

    def spoken(self) -> Iterator[tuple[HarmonyMessage, ...]]:
        """Yield the messages of each item.

        Reasoning, and calls made in the middle of it, are left out once the answer has followed, as in training.
        """
        for at, item in enumerate(self._items):
            is_read = self._callers.get(at, at) >= self._answered
            yield tuple(message for message in self._messages(item, at) if is_read or message.channel != "analysis")

    def _messages(self, item: Item, at: int) -> Sequence[HarmonyMessage]:
        if isinstance(item, Message):
            return (_spoken(item, "final" if at in self._answers else "commentary"),)
        if isinstance(item, Reasoning):
            return (HarmonyMessage("assistant", (item.text,), "analysis"),) if item.text else ()
        if isinstance(item, Call):
            was_cut = item.status == "incomplete" and at not in self._run
            return () if was_cut else (called(item),)
        if isinstance(item, CallOutput):
            return (self._output(item, at),)
        if isinstance(item, ServedCall):
            return self._run_here(item)
        if isinstance(item, McpApprovalRequest):  # an approved request becomes a call of its own
            return refused(item, self._refusals[item.id]) if item.id in self._refusals else ()
        return ()  # the head declares the tools of other items with all others, as in training

    def _output(self, output: CallOutput, at: int) -> HarmonyMessage:
        caller = self._items[self._callers[at]] if at in self._callers else None
        call = caller if isinstance(caller, Call) else None
        return returned(call, self._results.get(output.id) or output_of(output, call))

    def _run_here(self, call: ServedCall) -> Sequence[HarmonyMessage]:
        """Return a call with its result; nothing for a call that never ran."""
        result = self._results.get(call.id)
        if call.status in {"in_progress", "incomplete"} and not result:
            return ()
        return called(call), returned(call, result_of(call) if result is None else result)


def _spoken(message: Message, channel: Channel) -> HarmonyMessage:
    match message.role:
        case "user":
            return HarmonyMessage("user", (message.text,))
        case "assistant":
            return HarmonyMessage("assistant", (message.text,), channel)
        case "system" | "developer":
            return HarmonyMessage("developer", (f"# Instructions\n\n{message.text}",))


def _answers(items: Sequence[Item]) -> frozenset[int]:
    """Return the positions of the messages that answered the user.

    Some clients leave out the phase.  A message right before a call is then not an answer, as an answer would have
    ended the turn.
    """
    return frozenset(
        at
        for at, (item, after) in enumerate(pairwise((*items, None)))
        if isinstance(item, Message) and item.role == "assistant" and _is_answer(item, after)
    )


def _is_answer(message: Message, after: Item | None) -> bool:
    return message.phase == "final_answer" or (message.phase is UNSET and not isinstance(after, CallItem))


_UNKNOWN = f"{FUNCTIONS}.unknown"
"""The tool name for an output whose call is gone, because the store no longer has the call's response.  The model still
reads the output."""


def called(call: CallItem) -> HarmonyMessage:
    """The message with which the model makes ``call``."""
    return HarmonyMessage(
        "assistant",
        (arguments_of(call),),
        _channel(call),
        recipient=recipient_of(call),
        content_type="code" if _is_built_in(call) or isinstance(call, CustomToolCall) else "json",
        rebuilt=isinstance(call, FormCall | WebSearchCall),
    )


def returned(call: CallItem | None, text: str) -> HarmonyMessage:
    """The message in which the model reads ``text``, the output of ``call``; None if the call is gone."""
    if call is None:
        return HarmonyMessage("tool", (text,), "commentary", name=_UNKNOWN, recipient="assistant")
    return HarmonyMessage("tool", (text,), _channel(call), name=recipient_of(call), recipient="assistant")


def refused(request: McpApprovalRequest, response: McpApprovalResponse) -> tuple[HarmonyMessage, HarmonyMessage]:
    """A call that the client did not approve, and the refusal that the model reads instead of an output."""
    return called(request), returned(request, refusal_of(response))


def _is_built_in(call: CallItem) -> bool:
    return isinstance(call, HostedCall) or (isinstance(call, ShellCall) and call.runs_here)


def _channel(call: CallItem) -> Channel:
    return "analysis" if _is_built_in(call) else "commentary"
