"""Conversations as gpt-oss reads them: a list of Harmony messages, laid out as a pure function of the conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from msgspec import UNSET

from penstock.pipeline.frames import Channel, ResolvedRequest
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.pairs import behind_calls, callers_of
from penstock.pipeline.protocol.tools import HostedTool, Tool, ToolKey, Toolset, tool_key
from penstock.stages.models.call_results import output_of, refusals_in, result_of
from penstock.stages.models.harmony.vocabulary import FUNCTIONS, recipient_of
from penstock.stages.render.harmony.head import declared_tools, head
from penstock.stages.render.harmony.message import HarmonyMessage
from penstock.stages.render.item_texts import (
    PENDING,
    arguments_of,
    brought_by,
    found_elsewhere,
    is_continuation,
    is_cut,
    placed,
    split,
    summary_of,
)

_UNKNOWN = f"{FUNCTIONS}.unknown"
"""The tool name for an output whose call is gone, because the store no longer has the call's response.  The model still
reads the output."""


@dataclass(frozen=True)
class HarmonyConversation:
    """A whole prompt: its head, then the history, with the messages of each item in ``spoken`` (there may be none)."""

    head: tuple[HarmonyMessage, ...]
    history: tuple[items.Item, ...]
    spoken: tuple[tuple[HarmonyMessage, ...], ...]

    @property
    def messages(self) -> tuple[HarmonyMessage, ...]:
        """The messages of all items."""
        return tuple(chain.from_iterable(self.spoken))

    @property
    def unfinished(self) -> Channel | None:
        """The channel of the last message if its text was cut; the model can continue it."""
        match self.history[-1:], self.spoken[-1:]:
            case (item,), ((message,),) if is_cut(item):
                return message.channel
            case _:
                return None


def harmony_conversation(request: ResolvedRequest, *, system_instructions: bool = False) -> HarmonyConversation:
    """Lay out the messages of the prompt, without the beginning of the message that the model will write."""
    instructions, given = split(request)
    rest = behind_calls(given)  # a message has no ``call_id``: the model tells by the order what an output belongs to
    built_in = frozenset(tool.namespace for tool in request.facts.tools.tools if isinstance(tool, HostedTool))
    first = head(request, "\n".join(instructions), in_system=system_instructions)
    spoken = [
        *_Items(
            rest, results=request.results, built_in=built_in, tools=request.facts.tools, placed=placed(request)
        ).spoken()
    ]
    for at, (before, item) in enumerate(pairwise(rest)):
        if is_continuation(item, before) and item.id not in request.tokens:  # else it has a header of its own
            spoken[at : at + 2] = _joined(*spoken[at : at + 2])
    return HarmonyConversation(tuple(first), rest, tuple(spoken))


def _joined(
    begun: tuple[HarmonyMessage, ...], rest: tuple[HarmonyMessage, ...]
) -> tuple[tuple[HarmonyMessage, ...], tuple[HarmonyMessage, ...]]:
    """Join two messages of the same channel, each the only one of its item, to one of the second item."""
    match begun, rest:
        case (HarmonyMessage(channel=one) as first,), (HarmonyMessage(channel=other) as second,) if one == other:
            return (), (replace(second, texts=(*first.texts, *second.texts)),)
        case _:
            return begun, rest


class _Items:
    """The items after the head.  The messages of each item depend on the other items."""

    def __init__(
        self,
        history: tuple[items.Item, ...],
        results: Mapping[str, str],
        built_in: frozenset[str],
        tools: Toolset,
        placed: frozenset[ToolKey],
    ) -> None:
        self._items = history
        self._placed = [tool for tool in tools.tools if tool_key(tool) in placed and not isinstance(tool, HostedTool)]
        """The tools that stand where an item brings them."""
        self._descriptions = tools.descriptions
        self._built_in = built_in
        """The namespaces of the request's built-in tools; operators' servers may offer more functions in them."""
        self._program = next(map(recipient_of, filter(_is_program, tools.tools)), items.Program.tool[1])
        """The model's name for programs."""
        self._results = results
        self._callers = callers_of(history)
        self._run = frozenset(self._callers.values())
        self._answers = _answers(history)
        self._answered = max(self._answers, default=0)
        self._refusals = refusals_in(history)

    def spoken(self) -> Iterator[tuple[HarmonyMessage, ...]]:
        # reasoning, and calls made in the middle of it, are left out once the answer has followed, as in training
        for at, item in enumerate(self._items):
            is_read = self._callers.get(at, at) >= self._answered
            yield tuple(message for message in self._messages(item, at) if is_read or message.channel != "analysis")

    def _messages(self, item: items.Item, at: int) -> Sequence[HarmonyMessage]:
        if isinstance(item, items.Message):
            return (_spoken(item, "final" if at in self._answers else "commentary"),)
        if isinstance(item, items.Reasoning):
            return (HarmonyMessage("assistant", (item.text,), "analysis"),) if item.text else ()
        if isinstance(item, items.Call):
            if item.status == "incomplete" and at not in self._run:
                return ()
            is_async = isinstance(item, items.FunctionCall) and item.is_async
            return (self._called(item), self._returned(item, PENDING)) if is_async else (self._called(item),)
        if isinstance(item, items.CallOutput):
            return (self._output(item, at),)
        if isinstance(item, items.ServedCall):
            return self._run_here(item)
        if isinstance(item, items.McpApprovalRequest):  # an approved request becomes a call of its own
            refusal = self._refusals.get(item.id)
            return () if refusal is None else (self._called(item), self._returned(item, refusal))
        if isinstance(item, items.Compaction):
            return (HarmonyMessage("user", (summary_of(item, self._results),)),)
        if isinstance(item, items.AdditionalTools) and (declared := self._declared(item)):
            return (HarmonyMessage("developer", (declared,)),)
        return ()

    def _declared(self, item: items.AdditionalTools | items.ToolSearchOutput) -> str:
        """Return the declaration of the tools that an item brings; empty if the head declares them."""
        tools = brought_by(item, self._placed)
        return declared_tools(tools, self._descriptions) if tools else ""

    def _output(self, output: items.CallOutput, at: int) -> HarmonyMessage:
        caller = self._items[self._callers[at]] if at in self._callers else None
        call = caller if isinstance(caller, items.Call) else None
        text = self._results.get(output.id)
        if not text and isinstance(output, items.ToolSearchOutput):
            text = self._declared(output) or found_elsewhere(output)
        return self._returned(call, text or output_of(output, call))

    def _run_here(self, call: items.ServedCall) -> Sequence[HarmonyMessage]:
        result = self._results.get(call.id)
        if call.status in {"in_progress", "incomplete"} and not result:
            return ()
        return self._called(call), self._returned(call, result_of(call) if result is None else result)

    def _called(self, call: items.CallItem) -> HarmonyMessage:
        """Return the message with which the model makes ``call``."""
        return HarmonyMessage(
            "assistant",
            (arguments_of(call),),
            self._channel(call),
            recipient=self._recipient(call),
            content_type="code" if self._is_built_in(call) or isinstance(call, items.CustomToolCall) else "json",
            rebuilt=isinstance(call, items.FormCall | items.WebSearchCall),
        )

    def _returned(self, call: items.CallItem | None, text: str) -> HarmonyMessage:
        """Return the message in which the model reads ``text``, the output of ``call``; None if the call is gone."""
        if call is None:
            return HarmonyMessage("tool", (text,), "commentary", name=_UNKNOWN, recipient="assistant")
        return HarmonyMessage("tool", (text,), self._channel(call), name=self._recipient(call), recipient="assistant")

    def _recipient(self, call: items.CallItem) -> str:
        return self._program if isinstance(call, items.Program) else recipient_of(call)

    def _channel(self, call: items.CallItem) -> Channel:
        return "analysis" if self._is_built_in(call) else "commentary"

    def _is_built_in(self, call: items.CallItem) -> bool:
        match call:
            case items.ShellCall():
                return call.runs_here
            case items.McpCall():
                return call.server_label in self._built_in
            case _:
                return isinstance(call, items.HostedCall | items.Program)


def _is_program(tool: Tool) -> bool:
    return tool_key(tool) == items.Program.tool


def _spoken(message: items.Message, channel: Channel) -> HarmonyMessage:
    match message.role:
        case "user":
            return HarmonyMessage("user", (message.text,))
        case "assistant":
            return HarmonyMessage("assistant", (message.text,), channel)
        case "system" | "developer":
            return HarmonyMessage("developer", (f"# Instructions\n\n{message.text}",))


def _answers(history: Sequence[items.Item]) -> frozenset[int]:
    """Return the positions of the messages that answered the user.

    Some clients leave out the phase.  A message right before a call is then not an answer, as an answer would have
    ended the turn.
    """
    return frozenset(
        at
        for at, (item, after) in enumerate(pairwise((*history, None)))
        if isinstance(item, items.Message) and item.role == "assistant" and _is_answer(item, after)
    )


def _is_answer(message: items.Message, after: items.Item | None) -> bool:
    return message.phase == "final_answer" or (message.phase is UNSET and not isinstance(after, items.CallItem))
