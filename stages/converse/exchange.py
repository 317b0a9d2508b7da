"""The state of one response's exchange between the model and server-side tools, kept from turn to turn."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.pipeline.frames import (
    CallFinished,
    CallStarted,
    ConversedFrame,
    FinishReason,
    ItemClosed,
    ItemDelta,
    McpCallOpened,
    McpListToolsOpened,
    ResolvedRequest,
    ResponseStarted,
    ServerCallOpened,
    TurnFinished,
)
from penstock.pipeline.protocol.items import McpApprovalRequest, McpApprovalResponse, McpCall, of_type
from penstock.pipeline.protocol.tools import McpTool
from penstock.stages.converse.offer import Listing, known, offered
from penstock.stages.converse.running import Running, RunningCall
from penstock.stages.converse.sessions import Sessions
from penstock.stages.converse.transcript import Transcript
from penstock.stages.converse.turn import Called, Turn
from penstock.stages.services.tools import Toolbox


@dataclass(frozen=True)
class Limits:
    """Limits of one response; a request may allow fewer calls (``max_tool_calls``)."""

    call_seconds: float = 120.0
    listing_seconds: float = 10.0
    """Seconds for an MCP server to list its tools."""
    turns: int = 100
    result_characters: int = 100_000
    """The most characters of a call's result that the model reads; the middle of a longer one is left out."""
    retry_seconds: float = 1.0
    """Seconds before retrying a turn that the engine had no room for."""


class Exchange:
    """The state of one response; ``conversation`` is the model's next input."""

    def __init__(
        self, conversation: ResolvedRequest, toolbox: Toolbox, limits: Limits, clock: Callable[[], float]
    ) -> None:
        self.conversation = conversation
        self.transcript = Transcript(conversation.response)
        self.has_begun = False
        """True if a frame of the response has been yielded."""
        self._toolbox = toolbox
        self._limits = limits
        self._clock = clock
        self._sessions = Sessions(toolbox, conversation, limits.call_seconds, limits.result_characters)
        self._running = Running(self._sessions)
        self._goes_on = True
        self._turns = 0
        self._calls = 0
        self._room = conversation.sampling.max_tokens
        self._corrected = False
        self._ahead = 0.0  # seconds spent before the next turn, to be counted as part of it

    def noted(self, frame: ConversedFrame) -> ConversedFrame:
        """Record a frame that is about to be yielded, and return it."""
        self.has_begun = True
        self.transcript.feed(frame)
        return frame

    async def close(self) -> None:
        """Cancel all calls that still run, and close the sessions."""
        await self._running.close()
        await self._sessions.close()

    # Before the first turn

    async def begin(self) -> AsyncGenerator[ConversedFrame, None]:
        """List the tools of MCP servers that the conversation has not listed yet, and make the approved calls."""
        conversation = self.conversation
        listed = known((*conversation.history, *conversation.input))
        unknown = [server for server in conversation.tools.servers if server.label not in listed]
        approved = _approved(conversation)
        if not unknown and not approved:
            self.conversation = replace(conversation, tools=offered(conversation.tools, listed))
            return
        started = self._clock()
        yield ResponseStarted(conversation.response, conversation.input, conversation.origin)
        listings = [Listing(server, self._toolbox.mcp, self._limits.listing_seconds) for server in unknown]
        tasks = [self._running.start(listing.ask()) for listing in listings]
        for listing, task in zip(listings, tasks, strict=True):
            yield McpListToolsOpened(listing.server.label)
            yield CallStarted()
            yield await task
            yield ItemClosed(complete=True)
            listed[listing.server.label] = listing.tools
        self.conversation = replace(conversation, tools=offered(conversation.tools, listed))
        for request in approved:
            async with aclosing(self._approved_call(request)) as frames:
                async for frame in frames:
                    yield frame
        self._ahead = self._clock() - started

    async def _approved_call(self, request: McpApprovalRequest) -> AsyncGenerator[ConversedFrame, None]:
        self._calls += 1
        yield McpCallOpened(request.server_label, request.name, request.id)
        if request.arguments:
            yield ItemDelta(request.arguments)
        if self._may_call(request):
            running = self._running.call(Called(request.server_label, request.name, request.arguments))
            async with aclosing(running.frames(ItemClosed(complete=True))) as frames:
                async for frame in frames:
                    yield frame
            return
        yield CallStarted()
        yield CallFinished(error="The servers of this request offer no such tool.")
        yield ItemClosed(complete=True)

    def _may_call(self, request: McpApprovalRequest) -> bool:
        """Return True if the request offers this MCP tool; approval alone does not permit a call."""
        key = (request.server_label, request.name)
        tools = self.conversation.tools.tools
        return any(isinstance(tool, McpTool) and (tool.namespace, tool.name) == key for tool in tools)

    # Turns

    def next_turn(self) -> Turn | None:
        """Return the next turn, or None if the response is over."""
        if not self._goes_on:
            return None
        self._goes_on = False
        self._turns += 1
        self.conversation = self.transcript.continued(self.conversation)
        if self._room is not None:
            sampling = replace(self.conversation.sampling, max_tokens=self._room)
            self.conversation = replace(self.conversation, sampling=sampling)
        return Turn(self._sessions.source)

    async def run(self, turn: Turn) -> AsyncGenerator[ConversedFrame, None]:
        """Run the calls of a turn that has ended, and yield its held frames and its `TurnFinished`."""
        if turn.finished is None:  # the engine's stream broke off: a later stage reports it
            return
        finished, started = turn.finished, self._clock()
        if self._room is not None:
            self._room -= finished.output_tokens
        reason, count = self._allowed(turn)
        async with aclosing(self._run(turn, count)) as frames:
            async for frame in frames:
                yield frame
        duration = self._ahead + finished.duration + (self._clock() - started if turn.calls else 0.0)
        self._ahead = 0.0
        yield replace(finished, reason=reason, duration=duration)
        if reason == "stop":
            self._go_on(turn)

    def _allowed(self, turn: Turn) -> tuple[FinishReason, int]:
        """Return how the turn ends and how many of its calls to run.

        If a limit rules out another turn, no call is run, because the model would not read the results.
        """
        assert turn.finished is not None
        reason, count = turn.finished.reason, len(turn.calls)
        if reason != "stop" or not count:
            return reason, 0
        if not turn.waits_for_client and (limit := self._limit()):
            return limit, 0
        most = self.conversation.response.max_tool_calls
        if most is not None and self._calls + count > most:
            return "max_tool_calls", max(0, most - self._calls)
        return "stop", count

    def _limit(self) -> FinishReason | None:
        """Return the limit that rules out another turn, or None."""
        if self._room is not None and self._room <= 0:
            return "length"
        return "max_turns" if self._turns >= self._limits.turns else None

    async def _run(self, turn: Turn, count: int) -> AsyncGenerator[ConversedFrame, None]:
        """Yield the held frames of a turn, running its first ``count`` calls.

        A further call is closed as incomplete, and nothing after it is yielded.
        """
        self._calls += count
        calls = self._started(turn.calls[:count])
        is_call = bool(turn.calls)
        for frame in turn.held:
            if isinstance(frame, ItemClosed) and is_call and frame.complete:
                running = next(calls, None)
                if running is None:
                    yield ItemClosed(complete=False)
                    return
                async with aclosing(running.frames(frame)) as frames:
                    async for call_frame in frames:
                        yield call_frame
            elif not isinstance(frame, TurnFinished):
                yield frame
            if not isinstance(frame, ItemDelta):
                is_call = isinstance(frame, ServerCallOpened)

    def _started(self, calls: list[Called]) -> Iterator[RunningCall]:
        """Return the running calls, in order; all start now if the request allows parallel calls, else one by one."""
        running = map(self._running.call, calls)
        return iter(list(running)) if self.conversation.tools.parallel else running

    def _go_on(self, turn: Turn) -> None:
        """Schedule another turn if the model has something new to read.

        That is the results of its calls or, once per response, an error about a tool that does not exist.
        """
        if turn.calls:
            self._goes_on = not turn.waits_for_client
            if self.conversation.tools.choice == "required":  # met now; else every turn would have to call
                tools = replace(self.conversation.tools, choice="auto")
                self.conversation = replace(self.conversation, tools=tools)
        elif turn.recipient and not turn.waits_for_client and not self._corrected and not self._limit():
            self._corrected = self._goes_on = True
            self.transcript.answer(turn.recipient, f"Error: there is no tool {turn.recipient!r}. Go on without it.")


def _approved(conversation: ResolvedRequest) -> list[McpApprovalRequest]:
    """Return the approval requests that the client has granted in its input and whose calls have not been made."""
    items = (*conversation.history, *conversation.input)
    requests = {item.id: item for item in of_type(items, McpApprovalRequest)}
    called_ids = {item.approval_request_id for item in of_type(items, McpCall)}
    granted = (item for item in of_type(conversation.input, McpApprovalResponse) if item.approve)
    request_ids = dict.fromkeys(item.approval_request_id for item in granted)
    return [
        requests[request_id] for request_id in request_ids if request_id in requests and request_id not in called_ids
    ]
