"""The ladders of what the server runs itself.

Each event is made of the frame that tells the same thing, so that nothing is said to begin, to work or to fail before
it does.  How such an item ends is how what it asked for ended: where that never came, it is incomplete.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.pipeline.frames import (
    CallFinished,
    CallStarted,
    ItemDelta,
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
"""What a call of the browser's did that was cut before anybody knew what it asks for."""


class OpenServed(OpenItem):
    """An item of something that runs."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._running: CallStarted | None = None
        self._outcome: CallFinished | None = None

    def started(self, frame: CallStarted) -> Iterator[ResponseEvent]:
        """Remember that it runs; what that means on the wire is for each kind to say."""
        if self._running is not None:
            raise RuntimeError("what runs already was run")
        self._running = frame
        return iter(())

    def finished(self, frame: CallFinished) -> Iterator[ResponseEvent]:
        """Remember how it ended, likewise."""
        if self._running is None or self._outcome is not None:
            raise RuntimeError("what does not run was done")
        self._outcome = frame
        return iter(())

    def _status(self, status: ItemStatus) -> CallStatus:
        """The status of the item, which is ``status`` where it does not say how the item ends."""
        if status == "in_progress":
            return status
        if self._outcome is None:
            return "incomplete"
        return "completed" if self._outcome.error is None else "failed"

    def _progress(self, kind: type[Progress]) -> ToolProgress:
        event: Any = kind(next(self._numbers), self._id, self._index)
        made: ToolProgress = event
        return made


class OpenMcpListTools(OpenServed):
    """An MCP server that is asked what it offers."""

    prefix = "mcpl"

    def __init__(self, place: Place, opening: McpListToolsOpened) -> None:
        super().__init__(place)
        self._label = opening.server_label
        self._tools: tuple[ListedTool, ...] = ()

    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        """Nobody writes it."""
        raise RuntimeError("text came in what has none")

    def started(self, frame: CallStarted) -> Iterator[ResponseEvent]:
        """It is asked."""
        yield from super().started(frame)
        yield self._progress(McpListToolsInProgress)

    def finished(self, frame: CallFinished) -> Iterator[ResponseEvent]:
        """It answered, or did not."""
        self._tools = msgspec.convert(frame.data, tuple[ListedTool, ...])
        yield from super().finished(frame)
        yield self._progress(McpListToolsCompleted if frame.error is None else McpListToolsFailed)

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """An item without a status has no other way to say that it was broken off than to fail."""
        if self._outcome is None:
            if self._running is None:
                yield self._progress(McpListToolsInProgress)
            yield self._progress(McpListToolsFailed)
        yield from super().done(status)

    def item(self, status: ItemStatus) -> McpListTools:
        """The list."""
        if status == "in_progress":
            return McpListTools(self._id, self._label, ())
        error = self._outcome.error if self._outcome else NOT_LISTED
        return McpListTools(self._id, self._label, self._tools, error or UNSET)


class OpenMcpCall(OpenServed):
    """A call of a tool of an MCP server."""

    prefix = "mcp"

    def __init__(self, place: Place, opening: McpCallOpened) -> None:
        super().__init__(place)
        self._opening = opening

    def added(self) -> Iterator[ResponseEvent]:
        """It is being written."""
        yield from super().added()
        yield self._progress(McpCallInProgress)

    def delta(self, frame: ItemDelta) -> McpCallArgumentsDelta:
        """More of the arguments."""
        self._text.append(frame.text)
        return McpCallArgumentsDelta(next(self._numbers), self._id, self._index, frame.text)

    def started(self, frame: CallStarted) -> Iterator[ResponseEvent]:
        """Its arguments are whole."""
        yield from super().started(frame)
        yield self._arguments_done()

    def finished(self, frame: CallFinished) -> Iterator[ResponseEvent]:
        """The server has answered, or did not."""
        yield from super().finished(frame)
        yield self._progress(McpCallCompleted if frame.error is None else McpCallFailed)

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Arguments that were cut are done as well."""
        if self._running is None:
            yield self._arguments_done()
        yield from super().done(status)

    def item(self, status: ItemStatus) -> McpCall:
        """The call, with what it returned."""
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
    """A call that waits for the client's word: it is asked of nobody before it is whole."""

    prefix = "mcpr"

    def __init__(self, place: Place, opening: McpApprovalOpened) -> None:
        super().__init__(place)
        self._opening = opening
        self._cut = OpenMcpCall(place, McpCallOpened(opening.server_label, opening.name))

    def added(self) -> Iterator[ResponseEvent]:
        """Nothing is said yet."""
        return iter(())

    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        """More of the arguments, of which nothing is said yet."""
        self._text.append(frame.text)
        return None

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """The request; nobody can approve of half a call, so one that was cut is not asked for."""
        if status == "completed":
            yield OutputItemAdded(next(self._numbers), self._index, self.item(status))
            yield from super().done(status)
            return
        yield from self._cut.added()
        for text in self._text:
            yield self._cut.delta(ItemDelta(text))
        yield from self._cut.done(status)

    def item(self, status: ItemStatus) -> McpApprovalRequest | McpCall:
        """The request, or the call that was cut."""
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
        """It is being written."""
        yield from super().added()
        yield self._progress(CodeInterpreterCallInProgress)

    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        """More of the code."""
        self._text.append(frame.text)
        return CodeInterpreterCallCodeDelta(next(self._numbers), self._id, self._index, frame.text)

    def started(self, frame: CallStarted) -> Iterator[ResponseEvent]:
        """It is whole, and runs."""
        yield from super().started(frame)
        yield self._code_done()
        yield self._progress(CodeInterpreterCallInterpreting)

    def finished(self, frame: CallFinished) -> Iterator[ResponseEvent]:
        """It ran; there is no event for code that could not."""
        yield from super().finished(frame)
        if frame.error is None:
            yield self._progress(CodeInterpreterCallCompleted)

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Code that was cut is done as well."""
        if self._running is None:
            yield self._code_done()
        yield from super().done(status)

    def item(self, status: ItemStatus) -> CodeInterpreterCall:
        """The code, and what it put out."""
        outputs = self._outcome.data if self._outcome else ()
        code = "".join(self._text)
        return CodeInterpreterCall(self._id, code, self._container_id, self._status(status), outputs or None)

    @property
    def result(self) -> str | None:
        """What the code printed, as the model reads it."""
        return self._outcome.result if self._outcome else None

    def _code_done(self) -> ResponseEvent:
        return CodeInterpreterCallCodeDone(next(self._numbers), self._id, self._index, "".join(self._text))


class OpenWebCall(OpenServed):
    """A call of the browser: there is nothing to show before it is known what it asks for."""

    prefix = "ws"

    def added(self) -> Iterator[ResponseEvent]:
        """Nothing is said yet."""
        return iter(())

    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        """More of the arguments, which the item does not have."""
        return None

    def started(self, frame: CallStarted) -> Iterator[ResponseEvent]:
        """The browser is on its way."""
        yield from super().started(frame)
        yield from self._opened()
        yield self._progress(WebSearchCallSearching)

    def finished(self, frame: CallFinished) -> Iterator[ResponseEvent]:
        """It is back; there is no event for one that could not get there."""
        yield from super().finished(frame)
        if frame.error is None:
            yield self._progress(WebSearchCallCompleted)

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """A call that was cut is shown as well."""
        if self._running is None:
            yield from self._opened()
        yield from super().done(status)

    def item(self, status: ItemStatus) -> WebSearchCall:
        """The call, by its action."""
        known = self._outcome.data if self._outcome else ()
        begun = self._running.action if self._running else None
        return WebSearchCall(self._id, known[0] if known else begun or NO_ACTION, self._status(status))

    @property
    def result(self) -> str | None:
        """What the model sees in the browser."""
        return self._outcome.result if self._outcome else None

    def _opened(self) -> Iterator[ResponseEvent]:
        yield from super().added()
        yield self._progress(WebSearchCallInProgress)
