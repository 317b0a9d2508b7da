"""One response's exchange between the model and the tools that the server runs: what is known from turn to turn."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.pipeline.frames import (
    CallFinished,
    CallStarted,
    Conversation,
    ConversedFrame,
    FinishReason,
    ItemClosed,
    ItemDelta,
    McpCallOpened,
    McpListToolsOpened,
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
    """How far one response may go; a request may allow fewer calls."""

    call_seconds: float = 120.0
    listing_seconds: float = 10.0
    """For an MCP server to say what it offers."""
    turns: int = 100
    result_characters: int = 100_000
    """What the model reads of one call."""
    retry_seconds: float = 1.0
    """After which a turn that the engine had no room for tries again."""


class Exchange:
    """What one response knows; ``conversation`` is what the model reads next."""

    def __init__(
        self, conversation: Conversation, toolbox: Toolbox, limits: Limits, clock: Callable[[], float]
    ) -> None:
        self.conversation = conversation
        self.transcript = Transcript(conversation.response)
        self.has_begun = False
        """Whether anything has been told of it."""
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
        self._ahead = 0.0  # seconds that went by ahead of the next turn

    def noted(self, frame: ConversedFrame) -> ConversedFrame:
        """The frame, which goes out."""
        self.has_begun = True
        self.transcript.feed(frame)
        return frame

    async def close(self) -> None:
        """End whatever still runs."""
        await self._running.close()
        await self._sessions.close()

    # Ahead of the first turn

    async def begin(self) -> AsyncGenerator[ConversedFrame, None]:
        """Ask the MCP servers that are not known yet, and make the calls that the client has approved of."""
        conversation = self.conversation
        listed = known((*conversation.history, *conversation.input))
        unknown = [server for server in conversation.tools.servers if server.label not in listed]
        approved = _approved(conversation)
        if not unknown and not approved:
            self.conversation = replace(conversation, tools=offered(conversation.tools, listed))
            return
        started = self._clock()
        yield ResponseStarted(conversation.response, conversation.input, conversation.origin)
        asked = [Listing(server, self._toolbox.mcp, self._limits.listing_seconds) for server in unknown]
        tasks = [self._running.start(listing.ask()) for listing in asked]
        for listing, task in zip(asked, tasks, strict=True):
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
        """Whether it is a tool of an MCP server that the request offers: the client's word makes no other call."""
        key = (request.server_label, request.name)
        tools = self.conversation.tools.tools
        return any(isinstance(tool, McpTool) and (tool.namespace, tool.name) == key for tool in tools)

    # Turns

    def next_turn(self) -> Turn | None:
        """The turn that comes next, if any does."""
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
        """Run the calls of a turn that has ended, and tell how it ended."""
        if turn.finished is None:  # the engine's stream broke off: whoever comes behind says so
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
        """How the turn ends, and how many of its calls are run: none where nobody will read what they return."""
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
        """Why there can be no other turn."""
        if self._room is not None and self._room <= 0:
            return "length"
        return "max_turns" if self._turns >= self._limits.turns else None

    async def _run(self, turn: Turn, count: int) -> AsyncGenerator[ConversedFrame, None]:
        """What was held back of a turn, with the first ``count`` of its calls run; all ends at the next one."""
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
                    async for told in frames:
                        yield told
            elif not isinstance(frame, TurnFinished):
                yield frame
            if not isinstance(frame, ItemDelta):
                is_call = isinstance(frame, ServerCallOpened)

    def _started(self, calls: list[Called]) -> Iterator[RunningCall]:
        """The calls, one by one: all begin at once where the request allows that."""
        running = map(self._running.call, calls)
        return iter(list(running)) if self.conversation.tools.parallel else running

    def _go_on(self, turn: Turn) -> None:
        """Let the model go on where it has something new to read."""
        if turn.calls:
            self._goes_on = not turn.waits_for_client
            if self.conversation.tools.choice == "required":  # that was met
                tools = replace(self.conversation.tools, choice="auto")
                self.conversation = replace(self.conversation, tools=tools)
        elif turn.recipient and not turn.waits_for_client and not self._corrected and not self._limit():
            self._corrected = self._goes_on = True
            self.transcript.answer(turn.recipient, f"Error: there is no tool {turn.recipient!r}. Go on without it.")


def _approved(conversation: Conversation) -> list[McpApprovalRequest]:
    """The calls that the client has approved of, and that nobody has made yet."""
    items = (*conversation.history, *conversation.input)
    requests = {item.id: item for item in of_type(items, McpApprovalRequest)}
    made = {item.approval_request_id for item in of_type(items, McpCall)}
    granted = (item for item in of_type(conversation.input, McpApprovalResponse) if item.approve)
    names = dict.fromkeys(item.approval_request_id for item in granted)
    return [requests[name] for name in names if name in requests and name not in made]
