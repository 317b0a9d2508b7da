"""Ladders of calls: the order of a call's events, for each status that it may end with.

The checker, the follower and the event log use `LADDERS`.  ``penstock.stages.emit`` does not, so that the checker
tests it independently: change both to add a call.  `CallFollower` follows one call, and can bring it to its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, get_args

from msgspec.structs import replace

from penstock.pipeline.protocol.events import (
    CodeInterpreterCallCodeDone,
    CodeInterpreterCallCompleted,
    CodeInterpreterCallInProgress,
    CodeInterpreterCallInterpreting,
    CustomToolCallInputDone,
    Event,
    FunctionCallArgumentsDone,
    McpCallArgumentsDone,
    McpCallCompleted,
    McpCallFailed,
    McpCallInProgress,
    McpListToolsCompleted,
    McpListToolsFailed,
    McpListToolsInProgress,
    OutputItemDone,
    ResponseEvent,
    ShellCallCommandAdded,
    ShellCallCommandDelta,
    ShellCallCommandDone,
    ShellCallOutputContentDone,
    ToolProgress,
    WebSearchCallCompleted,
    WebSearchCallInProgress,
    WebSearchCallSearching,
)
from penstock.pipeline.protocol.items import (
    Call,
    CallStatus,
    CodeInterpreterCall,
    CustomToolCall,
    FunctionCall,
    McpApprovalRequest,
    McpCall,
    McpListTools,
    OutputItem,
    ServerItem,
    ShellCall,
    ShellCallOutput,
    WebSearchCall,
)

Step: TypeAlias = Mapping[CallStatus, type[Event]]
"""The next event, by the final status of the call; a call of a status that is missing here skips the step."""

CallItem: TypeAlias = Call | ServerItem | ShellCallOutput
"""All output items without content parts."""

NOT_LISTED = "The response broke off before the server had told what it offers."
"""The error of a list of MCP tools that was cut: it stands in for the status, which the item does not have."""


def _always(kind: type[Event]) -> Step:
    return dict.fromkeys(get_args(CallStatus), kind)


LADDERS: Mapping[type[OutputItem], tuple[Step, ...]] = {
    FunctionCall: (_always(FunctionCallArgumentsDone),),
    CustomToolCall: (_always(CustomToolCallInputDone),),
    McpListTools: (
        _always(McpListToolsInProgress),
        {"completed": McpListToolsCompleted, "failed": McpListToolsFailed, "incomplete": McpListToolsFailed},
    ),
    McpCall: (
        _always(McpCallInProgress),
        _always(McpCallArgumentsDone),
        {"completed": McpCallCompleted, "failed": McpCallFailed},
    ),
    CodeInterpreterCall: (
        _always(CodeInterpreterCallInProgress),
        _always(CodeInterpreterCallCodeDone),
        {"completed": CodeInterpreterCallInterpreting, "failed": CodeInterpreterCallInterpreting},
        {"completed": CodeInterpreterCallCompleted},
    ),
    WebSearchCall: (
        _always(WebSearchCallInProgress),
        {"completed": WebSearchCallSearching, "failed": WebSearchCallSearching},
        {"completed": WebSearchCallCompleted},
    ),
}
"""The events between added and done for each type of call, without the deltas."""

_PROGRESS = frozenset(get_args(ToolProgress))


class CallFollower:
    """The state machine for one call; ``item`` is the call as it was added."""

    def __init__(self, item: CallItem) -> None:
        self._item = item
        self._steps = LADDERS.get(type(item), ())
        self._commands = _command_events(item) if isinstance(item, ShellCall) else []
        self._outputs: list[dict[str, Any]] = []

    def feed(self, event: ResponseEvent) -> None:
        """Take the next event of the call, unless it is a delta of its text."""
        match event:
            case ShellCallCommandAdded() | ShellCallCommandDelta() | ShellCallCommandDone():
                del self._commands[:1]
            case ShellCallOutputContentDone():
                self._outputs += event.output
            case _:
                taken = [at for at, step in enumerate(self._steps, start=1) if type(event) in step.values()]
                self._steps = self._steps[taken[0] :] if taken else self._steps

    def closing(self, number: int, index: int, text: str, status: CallStatus) -> ResponseEvent:
        """Return the next event on the way to the end of the call, which ends with ``status`` and ``text``."""
        if self._commands:
            command_kind, *rest = self._commands[0]
            command_event: ResponseEvent = command_kind(number, index, *rest)
            return command_event
        kind: Any = next((step[status] for step in self._steps if status in step), None)
        if kind is None:
            return OutputItemDone(number, index, self._ended(text, status))
        place = (number, self._item.id, index)
        event: ResponseEvent = kind(*place) if kind in _PROGRESS else kind(*place, text)
        return event

    def _ended(self, text: str, status: CallStatus) -> OutputItem:
        match self._item:
            case McpApprovalRequest():
                return self._item
            case McpListTools():
                return self._item if status == "completed" else replace(self._item, error=NOT_LISTED)
            case FunctionCall() | McpCall():
                return replace(self._item, arguments=text, status=status)
            case CustomToolCall():
                return replace(self._item, input=text, status=status)
            case CodeInterpreterCall():
                return replace(self._item, code=text, status=status)
            case ShellCallOutput():
                return replace(self._item, output=tuple(self._outputs), status=status)
            case _:
                return replace(self._item, status=status)


def _command_events(item: ShellCall) -> list[tuple[Any, ...]]:
    """List the events for the commands of a shell call: type, command index, and text."""
    events = list[tuple[Any, ...]]()
    for at, command in enumerate(item.action.get("commands") or ()):
        events.append((ShellCallCommandAdded, at, ""))
        events += [(ShellCallCommandDelta, at, command)] if command else []
        events.append((ShellCallCommandDone, at, command))
    return events
