"""The lifecycle of each type of output item: the order of its events, for each status that it may end with.

The writer in ``penstock.stages.emit`` and `stream_state.StreamState`, which ends a stream early, follow the table
`LIFECYCLES` through `item_state.ItemState`.  The checker has a table of its own, `rules.ITEM_RULES`, so that it tests
both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from penstock.pipeline.protocol import events, items
from penstock.pipeline.protocol.events import Event
from penstock.pipeline.protocol.items import CallStatus, OutputItem, OutputPart, SummaryText

Part: TypeAlias = OutputPart | SummaryText

Moment: TypeAlias = Literal["opened", "started", "finished", "closed"]
"""The moment of an item's first frame, of its `CallStarted`, of its `CallFinished`, or of its `ItemClosed`."""

MOMENTS: tuple[Moment, ...] = get_args(Moment)

NOT_LISTED = "The response broke off before the server had told what it offers."
"""The error of a list of MCP tools that was cut: it stands in for the status, which the item does not have.

Stored logs do not contain it, so a change of it would change the events that are read from them.
"""

NO_ACTION: Mapping[str, Any] = {"type": "search", "query": ""}
"""The action of a browser call that was cut before its action was known."""


class PartLifecycle(NamedTuple):
    """The types of the events of a part, in order."""

    added: type[events.ContentPartAdded | events.ReasoningSummaryPartAdded]
    delta: type[events.TextDelta]
    text_done: type[events.TextDone]
    done: type[events.ContentPartDone | events.ReasoningSummaryPartDone]


def _content(delta: type[events.TextDelta], text_done: type[events.TextDone]) -> PartLifecycle:
    return PartLifecycle(events.ContentPartAdded, delta, text_done, events.ContentPartDone)


PARTS: Mapping[type[Part], PartLifecycle] = {
    items.OutputText: _content(events.OutputTextDelta, events.OutputTextDone),
    items.Refusal: _content(events.RefusalDelta, events.RefusalDone),
    items.ReasoningText: _content(events.ReasoningTextDelta, events.ReasoningTextDone),
    items.SummaryText: PartLifecycle(
        events.ReasoningSummaryPartAdded,
        events.ReasoningSummaryTextDelta,
        events.ReasoningSummaryTextDone,
        events.ReasoningSummaryPartDone,
    ),
}


_ANY_STATUS: tuple[CallStatus, ...] = ("completed", "incomplete", "failed")

_RUN_STATUSES: tuple[CallStatus, ...] = (*_ANY_STATUS, "in_progress")
"""A call that exceeds ``max_tool_calls`` stays in progress, as at OpenAI."""


class Milestone(NamedTuple):
    """An event that comes once, and the moment when it is due; the item's final status determines its type.

    An item that ends with a status that is missing in ``by_status`` skips the milestone.
    """

    due: Moment
    by_status: Mapping[CallStatus, type[Event]]


def _always(due: Moment, kind: type[Event]) -> Milestone:
    return Milestone(due, dict.fromkeys(_RUN_STATUSES, kind))


def _if_started(due: Moment, kind: type[Event]) -> Milestone:
    return Milestone(due, dict.fromkeys(("completed", "failed", "in_progress"), kind))


Detail: TypeAlias = tuple[type[Event], tuple[Any, ...]]
"""An event for a piece of an item: its type, and its fields after the place."""


def _no_details(item: Any) -> Sequence[Detail]:
    return ()


def _commands(call: items.ShellCall) -> list[Detail]:
    details = list[Detail]()
    for at, command in enumerate(call.action.get("commands") or ()):
        details.append((events.ShellCallCommandAdded, (at, "")))
        details += [(events.ShellCallCommandDelta, (at, command))] if command else []
        details.append((events.ShellCallCommandDone, (at, command)))
    return details


def _outputs(item: items.ShellCallOutput) -> list[Detail]:
    details = list[Detail]()
    for at, output in enumerate(item.output):
        delta = {name: output[name] for name in ("stdout", "stderr") if output[name]}
        details += [(events.ShellCallOutputContentDelta, (at, delta))] if delta else []
        details.append((events.ShellCallOutputContentDone, (at, (output,))))
    return details


@dataclass(frozen=True)
class ItemLifecycle:
    """A row of the table.  The events of an item are its parts, its details and its milestones."""

    parts: tuple[Part, ...] = ()
    """The parts that it may have, empty."""
    needs_part: bool = False
    """True if clients expect it to have a first part, whatever happens."""
    delta: type[events.TextDelta] | None = None
    """The delta of its text, if the text is a field and not a part."""
    text_field: str | None = None
    milestones: tuple[Milestone, ...] = ()
    details: Callable[[Any], Sequence[Detail]] = _no_details
    added: Moment = "opened"
    """The moment when it is added.  The other events of this moment and of earlier ones follow at once."""
    statuses: tuple[CallStatus, ...] = ("completed", "incomplete")
    """The final statuses.  Stored logs depend on their order, see `StreamState.predict`; append new ones."""
    cut_fields: Mapping[str, Any] = field(default_factory=dict)
    """The fields that it gets if it is cut before it has them."""
    hides_result: bool = False
    """True if it does not show the text that the model reads as the result of the call."""
    shows_result: bool = False
    """True if it is nothing but that text."""

    @property
    def runs(self) -> bool:
        """True if this server runs the call of the item."""
        return (
            self.hides_result
            or self.shows_result
            or any(milestone.due in ("started", "finished") for milestone in self.milestones)
        )


LIFECYCLES: dict[type[OutputItem], ItemLifecycle] = {
    items.Message: ItemLifecycle(parts=(items.OutputText(""), items.Refusal("")), needs_part=True),
    items.Reasoning: ItemLifecycle(parts=(items.ReasoningText(""), items.SummaryText(""))),
    items.FunctionCall: ItemLifecycle(
        delta=events.FunctionCallArgumentsDelta,
        text_field="arguments",
        milestones=(_always("closed", events.FunctionCallArgumentsDone),),
    ),
    items.CustomToolCall: ItemLifecycle(
        delta=events.CustomToolCallInputDelta,
        text_field="input",
        milestones=(_always("closed", events.CustomToolCallInputDone),),
    ),
    items.LocalShellCall: ItemLifecycle(added="closed"),
    items.ShellCall: ItemLifecycle(added="closed", details=_commands),
    items.ApplyPatchCall: ItemLifecycle(added="closed"),
    items.ShellCallOutput: ItemLifecycle(details=_outputs, hides_result=True),
    items.ToolSearchCall: ItemLifecycle(added="closed"),
    items.ComputerCall: ItemLifecycle(added="closed"),
    items.ToolSearchOutput: ItemLifecycle(hides_result=True),
    items.Program: ItemLifecycle(added="closed"),
    items.ProgramOutput: ItemLifecycle(added="closed", shows_result=True),
    items.McpListTools: ItemLifecycle(
        milestones=(
            _always("started", events.McpListToolsInProgress),
            Milestone(
                "finished",
                {
                    "completed": events.McpListToolsCompleted,
                    "failed": events.McpListToolsFailed,
                    "incomplete": events.McpListToolsFailed,
                },
            ),
        ),
        statuses=_ANY_STATUS,
        cut_fields={"error": NOT_LISTED},
    ),
    items.McpCall: ItemLifecycle(
        delta=events.McpCallArgumentsDelta,
        text_field="arguments",
        milestones=(
            _always("opened", events.McpCallInProgress),
            _always("started", events.McpCallArgumentsDone),
            Milestone("finished", {"completed": events.McpCallCompleted, "failed": events.McpCallFailed}),
        ),
        statuses=_RUN_STATUSES,
    ),
    items.McpApprovalRequest: ItemLifecycle(added="closed"),
    items.Compaction: ItemLifecycle(milestones=(_always("closed", events.CompactionCompacting),), added="closed"),
    items.CodeInterpreterCall: ItemLifecycle(
        delta=events.CodeInterpreterCallCodeDelta,
        text_field="code",
        milestones=(
            _always("opened", events.CodeInterpreterCallInProgress),
            _always("started", events.CodeInterpreterCallCodeDone),
            _if_started("started", events.CodeInterpreterCallInterpreting),
            Milestone("finished", {"completed": events.CodeInterpreterCallCompleted}),
        ),
        statuses=_RUN_STATUSES,
        hides_result=True,
    ),
    items.WebSearchCall: ItemLifecycle(
        milestones=(
            _always("opened", events.WebSearchCallInProgress),
            _if_started("started", events.WebSearchCallSearching),
            Milestone("finished", {"completed": events.WebSearchCallCompleted}),
        ),
        added="started",
        statuses=_RUN_STATUSES,
        cut_fields={"action": NO_ACTION},
        hides_result=True,
    ),
    items.FileSearchCall: ItemLifecycle(
        milestones=(
            _always("opened", events.FileSearchCallInProgress),
            _if_started("started", events.FileSearchCallSearching),
            Milestone("finished", {"completed": events.FileSearchCallCompleted}),
        ),
        added="started",
        statuses=_RUN_STATUSES,
        hides_result=True,
    ),
}
