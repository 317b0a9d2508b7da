"""The ladders of server-side tools.

Each progress event is made from the frame that reports the same step, so that no event precedes what it reports.  The
status of an item follows the outcome of its call; if the call never ended, the item is incomplete.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import UNSET

from penstock.pipeline.frames import (
    BrowserAction,
    CallFinished,
    CallStarted,
    CodeOutputs,
    ItemDelta,
    ListedTools,
    McpApprovalOpened,
    McpCallOpened,
    McpListToolsOpened,
    mcp_error,
)
from penstock.pipeline.lifecycle.ladders import NOT_LISTED
from penstock.pipeline.protocol.events import (
    CodeInterpreterCallCodeDelta,
    CodeInterpreterCallCodeDone,
    CodeInterpreterCallCompleted,
    CodeInterpreterCallInProgress,
    CodeInterpreterCallInterpreting,
    McpCallArgumentsDelta,
    McpCallArgumentsDone,
    McpCallCompleted,
    McpCallFailed,
    McpCallInProgress,
    McpListToolsCompleted,
    McpListToolsFailed,
    McpListToolsInProgress,
    OutputItemAdded,
    Progress,
    ResponseEvent,
    ToolProgress,
    WebSearchCallCompleted,
    WebSearchCallInProgress,
    WebSearchCallSearching,
)
from penstock.pipeline.protocol.items import (
    CallStatus,
    CodeInterpreterCall,
    ItemStatus,
    ListedTool,
    McpApprovalRequest,
    McpCall,
    McpListTools,
    WebSearchCall,
)
from penstock.stages.emit.ladder import OpenItem, Place

NO_ACTION: dict[str, Any] = {"type": "search", "query": ""}
"""The action of a browser call that was cut before its arguments were complete."""


class OpenServed(OpenItem):
    """An item with a call that the server runs."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._running: CallStarted | None = None
        self._outcome: CallFinished | None = None

    def started(self, frame: CallStarted) -> Iterator[ResponseEvent]:
        """Record that the call runs; subclasses add the events."""
        if self._running is not None:
            raise RuntimeError("what runs already was run")
        self._running = frame
        return iter(())

    def finished(self, frame: CallFinished) -> Iterator[ResponseEvent]:
        """Record how the call ended; subclasses add the events."""
        if self._running is None or self._outcome is not None:
            raise RuntimeError("what does not run was done")
        self._outcome = frame
        return iter(())

    def _status(self, status: ItemStatus) -> CallStatus:
        """Return ``status`` if it is ``in_progress``, else the outcome of the call (``incomplete`` if it has none)."""
        if status == "in_progress":
            return status
        if self._outcome is None:
            return "incomplete"
        return "completed" if self._outcome.error is None else "failed"

    def _progress(self, kind: type[Progress]) -> ToolProgress:
        event: Any = kind(next(self._numbers), self._id, self._index)
        progress: ToolProgress = event
        return progress


class OpenMcpListTools(OpenServed):
    """The listing of an MCP server's tools."""

    prefix = "mcpl"

    def __init__(self, place: Place, opening: McpListToolsOpened) -> None:
        super().__init__(place)
        self._label = opening.server_label
        self._tools: tuple[ListedTool, ...] = ()

    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        """Raise `RuntimeError`: the model does not write this item."""
        raise RuntimeError("text came in what has none")

    def started(self, frame: CallStarted) -> Iterator[ResponseEvent]:
        """Yield the event for the request to the server."""
        yield from super().started(frame)
        yield self._progress(McpListToolsInProgress)

    def finished(self, frame: CallFinished) -> Iterator[ResponseEvent]:
        """Take the tools, and yield the event for the server's answer or failure."""
        self._tools = frame.data.tools if isinstance(frame.data, ListedTools) else ()
        yield from super().finished(frame)
        yield self._progress(McpListToolsCompleted if frame.error is None else McpListToolsFailed)

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Yield the closing events; a listing that was broken off fails, because the item has no status field."""
        if self._outcome is None:
            if self._running is None:
                yield self._progress(McpListToolsInProgress)
            yield self._progress(McpListToolsFailed)
        yield from super().done(status)

    def item(self, status: ItemStatus) -> McpListTools:
        """Return the list of tools."""
        if status == "in_progress":
            return McpListTools(self._id, self._label, ())
        error = self._outcome.error if self._outcome else NOT_LISTED
        return McpListTools(self._id, self._label, self._tools, error or UNSET)


class OpenMcpCall(OpenServed):
    """A call to a tool of an MCP server."""

    prefix = "mcp"

    def __init__(self, place: Place, opening: McpCallOpened) -> None:
        super().__init__(place)
        self._opening = opening

    def added(self) -> Iterator[ResponseEvent]:
        """Yield the events for a call whose arguments begin."""
        yield from super().added()
        yield self._progress(McpCallInProgress)

    def delta(self, frame: ItemDelta) -> McpCallArgumentsDelta:
        """Take more of the arguments and return their event."""
        self._text.append(frame.text)
        return McpCallArgumentsDelta(next(self._numbers), self._id, self._index, frame.text)

    def started(self, frame: CallStarted) -> Iterator[ResponseEvent]:
        """Yield the event for complete arguments."""
        yield from super().started(frame)
        yield self._arguments_done()

    def finished(self, frame: CallFinished) -> Iterator[ResponseEvent]:
        """Yield the event for the server's answer or failure."""
        yield from super().finished(frame)
        yield self._progress(McpCallCompleted if frame.error is None else McpCallFailed)

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Yield the closing events; arguments that were cut get their done event here."""
        if self._running is None:
            yield self._arguments_done()
        yield from super().done(status)

    def item(self, status: ItemStatus) -> McpCall:
        """Return the call, with its output or error."""
        opening, outcome = self._opening, self._outcome
        return McpCall(
            self._id,
            opening.server_label,
            opening.name,
            "".join(self._text),
            self._status(status),
            outcome.result if outcome and outcome.error is None else None,
            mcp_error(outcome) if outcome and outcome.error is not None else None,
            opening.approval_request_id,
        )

    def _arguments_done(self) -> ResponseEvent:
        return McpCallArgumentsDone(next(self._numbers), self._id, self._index, "".join(self._text))


class OpenMcpApproval(OpenItem):
    """A call that needs the client's approval; nothing is sent before the call is complete."""

    prefix = "mcpr"

    def __init__(self, place: Place, opening: McpApprovalOpened) -> None:
        super().__init__(place)
        self._opening = opening
        self._cut = OpenMcpCall(place, McpCallOpened(opening.server_label, opening.name))

    def added(self) -> Iterator[ResponseEvent]:
        """Return no events yet."""
        return iter(())

    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        """Take more of the arguments, without an event."""
        self._text.append(frame.text)
        return None

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Yield the approval request; a call that was cut comes out as an incomplete MCP call instead."""
        if status == "completed":
            yield OutputItemAdded(next(self._numbers), self._index, self.item(status))
            yield from super().done(status)
            return
        yield from self._cut.added()
        for text in self._text:
            yield self._cut.delta(ItemDelta(text))
        yield from self._cut.done(status)

    def item(self, status: ItemStatus) -> McpApprovalRequest | McpCall:
        """Return the request, or the call that was cut."""
        if status != "completed":
            return self._cut.item(status)
        return McpApprovalRequest(self._id, self._opening.server_label, self._opening.name, "".join(self._text))


class OpenCodeCall(OpenServed):
    """Code for the sandbox."""

    prefix = "ci"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._container_id = place.container_id

    def added(self) -> Iterator[ResponseEvent]:
        """Yield the events for a call whose code begins."""
        yield from super().added()
        yield self._progress(CodeInterpreterCallInProgress)

    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        """Take more of the code and return its event."""
        self._text.append(frame.text)
        return CodeInterpreterCallCodeDelta(next(self._numbers), self._id, self._index, frame.text)

    def started(self, frame: CallStarted) -> Iterator[ResponseEvent]:
        """Yield the events for code that is complete and runs."""
        yield from super().started(frame)
        yield self._code_done()
        yield self._progress(CodeInterpreterCallInterpreting)

    def finished(self, frame: CallFinished) -> Iterator[ResponseEvent]:
        """Yield the event for code that ran; the API has no event for code that could not run."""
        yield from super().finished(frame)
        if frame.error is None:
            yield self._progress(CodeInterpreterCallCompleted)

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Yield the closing events; code that was cut gets its done event here."""
        if self._running is None:
            yield self._code_done()
        yield from super().done(status)

    def item(self, status: ItemStatus) -> CodeInterpreterCall:
        """Return the code, with its outputs."""
        data = self._outcome.data if self._outcome else None
        outputs = data.outputs if isinstance(data, CodeOutputs) else ()
        code = "".join(self._text)
        return CodeInterpreterCall(self._id, code, self._container_id, self._status(status), outputs or None)

    @property
    def result(self) -> str | None:
        """The output of the code, as the model reads it."""
        return self._outcome.result if self._outcome else None

    def _code_done(self) -> ResponseEvent:
        return CodeInterpreterCallCodeDone(next(self._numbers), self._id, self._index, "".join(self._text))


class OpenWebCall(OpenServed):
    """A call to the browser; nothing is sent before the arguments are complete, as the item shows only an action."""

    prefix = "ws"

    def added(self) -> Iterator[ResponseEvent]:
        """Return no events yet."""
        return iter(())

    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        """Ignore the arguments; the item does not show them."""
        return None

    def started(self, frame: CallStarted) -> Iterator[ResponseEvent]:
        """Yield the events that open the item and start the search."""
        yield from super().started(frame)
        yield from self._opened()
        yield self._progress(WebSearchCallSearching)

    def finished(self, frame: CallFinished) -> Iterator[ResponseEvent]:
        """Yield the event for a call that succeeded; the API has no event for a failed call."""
        yield from super().finished(frame)
        if frame.error is None:
            yield self._progress(WebSearchCallCompleted)

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Yield the closing events; a call that was cut is opened here."""
        if self._running is None:
            yield from self._opened()
        yield from super().done(status)

    def item(self, status: ItemStatus) -> WebSearchCall:
        """Return the call, with its action."""
        data = self._outcome.data if self._outcome else None
        running_action = self._running.action if self._running else None
        action = data.action if isinstance(data, BrowserAction) else running_action or NO_ACTION
        return WebSearchCall(self._id, action, self._status(status))

    @property
    def result(self) -> str | None:
        """The text that the model reads in the browser."""
        return self._outcome.result if self._outcome else None

    def _opened(self) -> Iterator[ResponseEvent]:
        yield from super().added()
        yield self._progress(WebSearchCallInProgress)
