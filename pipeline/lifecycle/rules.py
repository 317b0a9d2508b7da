"""The rules of a stream: the error for a broken rule, the rule for texts, and `ITEM_RULES` for each type of item.

The table repeats much of `item_lifecycles.LIFECYCLES`, which writes the streams.  The checker must not share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec import UNSET

from penstock.pipeline.protocol import events, items
from penstock.pipeline.protocol.items import CallStatus, Logprob, OutputItem


class InvariantBroken(AssertionError):
    """A stream broke a rule that clients rely on."""


def rule(holds: bool, text: str) -> None:
    """Raise `InvariantBroken` with the ``text`` of the rule unless it ``holds``."""
    if not holds:
        raise InvariantBroken(text)


@dataclass
class Text:
    """A text of a stream: its deltas so far, and the text of its done event as ``done``."""

    deltas: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    has_all_logprobs: bool = True
    done: str | None = None

    def grow(self, delta: str, logprobs: Iterable[Logprob] = ()) -> None:
        """Take the next delta."""
        logprobs = tuple(logprobs)
        rule(bool(delta or logprobs), "deltas are never empty")
        rule(self.done is None, "no delta follows the done event of its text")
        self.deltas.append(delta)
        before = len(self.logprobs)
        self.logprobs += logprobs
        self.has_all_logprobs = self.has_all_logprobs and len(self.logprobs) > before

    def close(self, text: str) -> None:
        """Take the text of the done event."""
        rule(self.done is None, "a text is done once")
        rule(text == "".join(self.deltas), "the deltas of a text sum to the text that its done event carries")
        token_text = b"".join(bytes(token.bytes) for token in self.logprobs).decode(errors="replace")
        # Not equal: a stop string may begin inside a token, and only the beginning of that token is in the text.
        agree = token_text in text or text in token_text
        rule(agree or not self.has_all_logprobs, "the bytes of a text's tokens spell the text")
        self.done = text


Step: TypeAlias = Mapping[CallStatus, type[events.Event]]
"""The next event, by the final status of the call; a call of a status that is missing here skips the step."""


def _always(kind: type[events.Event]) -> Step:
    return {"completed": kind, "failed": kind, "incomplete": kind, "in_progress": kind}


def _if_started(kind: type[events.Event]) -> Step:
    return {"completed": kind, "failed": kind, "in_progress": kind}


ANY_VALUE = object()


@dataclass(frozen=True)
class ItemRules:
    """The rules for the items of one type."""

    growing: Mapping[str, Any] = field(default_factory=dict)
    """The fields beside the status that may change until the item is done, with their values when it is added.

    `ANY_VALUE` stands for a field that may be known by then.
    """
    parts: tuple[type, ...] = ()
    text: str | None = None
    """The field that holds the text of a call, and the field of the event that ends the text."""
    delta: type[events.Event] | None = None
    steps: tuple[Step, ...] = ()
    """The events between added and done, without deltas."""
    begins_done: bool = False
    """True if its status says from its beginning how it has ended."""
    runs: bool = False
    """True if it may fail, and if it stays in progress when it exceeds ``max_tool_calls``."""


_NO_PROGRESS = ItemRules()

ITEM_RULES: dict[type[OutputItem], ItemRules] = {
    items.Message: ItemRules({"content": ()}, parts=(items.OutputText, items.Refusal)),
    items.Reasoning: ItemRules(
        {"summary": (), "content": (), "encrypted_content": UNSET}, parts=(items.ReasoningText, items.SummaryText)
    ),
    items.FunctionCall: ItemRules(
        {"arguments": ""},
        text="arguments",
        delta=events.FunctionCallArgumentsDelta,
        steps=(_always(events.FunctionCallArgumentsDone),),
    ),
    items.CustomToolCall: ItemRules(
        {"input": ""},
        text="input",
        delta=events.CustomToolCallInputDelta,
        steps=(_always(events.CustomToolCallInputDone),),
    ),
    items.LocalShellCall: _NO_PROGRESS,
    items.ShellCall: _NO_PROGRESS,
    items.ApplyPatchCall: _NO_PROGRESS,
    items.McpApprovalRequest: _NO_PROGRESS,
    items.Compaction: ItemRules({"encrypted_content": ""}, steps=(_always(events.CompactionCompacting),)),
    items.ShellCallOutput: ItemRules({"output": ()}),
    items.ToolSearchCall: _NO_PROGRESS,
    items.ComputerCall: _NO_PROGRESS,
    items.ToolSearchOutput: ItemRules({"tools": ()}),
    items.Program: _NO_PROGRESS,
    items.ProgramOutput: ItemRules(begins_done=True),
    items.McpListTools: ItemRules(
        {"tools": (), "error": UNSET},
        steps=(
            _always(events.McpListToolsInProgress),
            {
                "completed": events.McpListToolsCompleted,
                "failed": events.McpListToolsFailed,
                "incomplete": events.McpListToolsFailed,
            },
        ),
    ),
    items.McpCall: ItemRules(
        {"arguments": "", "output": None, "error": None},
        text="arguments",
        delta=events.McpCallArgumentsDelta,
        steps=(
            _always(events.McpCallInProgress),
            _always(events.McpCallArgumentsDone),
            {"completed": events.McpCallCompleted, "failed": events.McpCallFailed},
        ),
        runs=True,
    ),
    items.CodeInterpreterCall: ItemRules(
        {"code": "", "outputs": None},
        text="code",
        delta=events.CodeInterpreterCallCodeDelta,
        steps=(
            _always(events.CodeInterpreterCallInProgress),
            _always(events.CodeInterpreterCallCodeDone),
            _if_started(events.CodeInterpreterCallInterpreting),
            {"completed": events.CodeInterpreterCallCompleted},
        ),
        runs=True,
    ),
    items.WebSearchCall: ItemRules(
        {"action": ANY_VALUE, "results": UNSET},
        steps=(
            _always(events.WebSearchCallInProgress),
            _if_started(events.WebSearchCallSearching),
            {"completed": events.WebSearchCallCompleted},
        ),
        runs=True,
    ),
    items.FileSearchCall: ItemRules(
        {"queries": ANY_VALUE, "results": None},
        steps=(
            _always(events.FileSearchCallInProgress),
            _if_started(events.FileSearchCallSearching),
            {"completed": events.FileSearchCallCompleted},
        ),
        runs=True,
    ),
}
