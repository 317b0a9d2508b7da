"""The loop of one response between the model and server-side tools.

The state machine decides, and the stage waits: where a frame depends on work in progress, the machine yields the task
whose result is the frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.items import (
    Compaction,
    Item,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    ServedCall,
    caller_of,
    images_of,
    of_type,
)
from penstock.pipeline.protocol.superseded import would_supersede
from penstock.pipeline.protocol.tools import HostedTool, McpTool, Toolset, tool_key
from penstock.pipeline.tasks import MANY_VALUES, apart, in_thread
from penstock.services.tools import PastCall, Toolbox
from penstock.stages.converse.mcp_tools import known_tools, list_tools, with_mcp_tools
from penstock.stages.converse.programs import Programs, ended, open_programs, past_calls
from penstock.stages.converse.sessions import FrameOrTask, Recalled, RunningCall, Sessions, Step
from penstock.stages.converse.transcript import Transcript
from penstock.stages.converse.turn import ModelTurn, PreparingTurn, SummaryTurn, ToolCall

MOST_PROGRAMS = 16
"""Programs of a conversation that go on in one response."""


@dataclass(frozen=True)
class Limits:
    """Limits of one response; a request may allow fewer calls (``max_tool_calls``)."""

    call_seconds: float = 120.0
    listing_seconds: float = 10.0
    """Seconds for an MCP server to list its tools."""
    turns: int = 100
    result_characters: int = 100_000
    """The most characters of a call's result that the model reads; the middle of a longer one is left out."""
    context_length: int = 131_072
    """The tokens that a prompt and its answer may have together."""
    retry_seconds: float = 1.0
    """Seconds before retrying a turn that the engine had no room for."""


class ToolLoop:
    """State machine, one per response; ``request`` is what the model reads in its next turn.

    It looks at all items of the request.
    """

    def __init__(
        self,
        request: frames.ResolvedRequest,
        toolbox: Toolbox,
        limits: Limits,
        clock: Callable[[], float],
        is_steered: Callable[[str], bool],
    ) -> None:
        self.request = request
        self.has_begun = False
        """True if a frame of the response has been yielded."""
        self._transcript = Transcript(request.facts)
        self.take_text = self._transcript.take_text
        """Take the text of a delta that the stage passes on as it is."""
        self.is_plain = False
        """True while deltas may be passed on as they are."""
        self._toolbox = toolbox
        self._limits = limits
        self._clock = clock
        self._is_steered = partial(is_steered, request.facts.response_id)
        self._is_cut = False  # the rest of the turn is dropped
        self._is_stopped = False  # a stop string has ended the turn
        self._has_stopped = False
        items = request.items
        self._sessions = Sessions(
            toolbox,
            request,
            limits.call_seconds,
            limits.result_characters,
            cited=_cited(items),
        )
        self._known = known_tools(items)
        makes_calls = request.facts.purpose.generates and not self._compacts_only
        self._approved = _approved(items, request.facts.input) if makes_calls else []
        self._open = open_programs(request) if makes_calls else []
        self.is_unspoken = False
        """True if the model has nothing to say in this turn, because a program waits for the client."""
        self._turn: ModelTurn | SummaryTurn | PreparingTurn = ModelTurn()
        self._goes_on = True
        self._turns = 0
        self._calls = 0
        self._tokens_left = request.facts.sampling.max_tokens
        self._has_corrected = False
        self._has_refused = False
        self._used: dict[str, str] = {}  # approvals that other responses have used
        self._seconds_before = 0.0  # spent before the next turn, and counted as part of it

    def note(self, frame: frames.ConversedFrame) -> frames.ConversedFrame:
        """Record a frame that is about to be yielded, and return it."""
        self.has_begun = True
        self._transcript.feed(frame)
        self.take_text = self._transcript.take_text
        if isinstance(frame, frames.CallFinished) and isinstance(frame.data, frames.LoadedTools):
            self._offer(self.request.facts.tools.loading(frame.data.tools))
        return frame

    @property
    def finished(self) -> frames.TurnFinished | None:
        """The end of this turn, once the model has come to it."""
        return self._turn.finished

    async def close(self) -> None:
        """Cancel all calls that still run, and close the sessions."""
        await self._sessions.close()

    # Before the first turn

    async def claim(self) -> None:
        """Use the approvals of the request, so that no other response makes their calls."""
        facts, approvals = self.request.facts, self._toolbox.approvals
        for approval in self._approved:
            if approvals is None:
                return
            used_by = await approvals.use(facts.origin.owner, approval.id, facts.response_id)
            if used_by != facts.response_id:
                self._used[approval.id] = used_by

    async def describe(self) -> None:
        """Have the kinds whose words depend on the tools of the request describe themselves, once these are listed."""
        for name, kind in kinds().items():
            if kind.describe is None:
                continue
            tools = self.request.facts.tools
            is_offered = await apart(len(tools.tools) > MANY_VALUES, _has, tools, name)
            if is_offered:
                words = await in_thread(kind.describe, tools)  # it takes seconds for thousands of tools
                self._offer(replace(tools, descriptions={**tools.descriptions, name: words}))

    def begin(self) -> Iterator[Step]:
        """Begin the response before its first turn.

        List the tools of MCP servers that the conversation has not listed yet, make the approved calls, and let
        programs go on that have waited for the client.
        """
        if self._compacts_only or not self.request.facts.purpose.generates:
            return
        request, known = self.request, self._known
        unlisted = [server for server in request.facts.tools.servers if server.label not in known]
        if not unlisted and not self._approved and not self._open:
            self._offer(with_mcp_tools(request.facts.tools, known))
            return
        yield frames.ResponseStarted(request.facts)
        started = self._clock()  # a queued response has waited for its turn until now
        seconds = self._limits.listing_seconds
        tasks = [self._sessions.start(list_tools(server, self._toolbox, seconds)) for server in unlisted]
        for server, task in zip(unlisted, tasks, strict=True):
            yield frames.McpListToolsOpened(server.label)
            yield frames.CallStarted()
            yield task
            yield frames.ItemClosed(complete=True)
            listed = task.result().data
            known[server.label] = listed.tools if isinstance(listed, frames.ListedTools) else ()
        self._offer(with_mcp_tools(request.facts.tools, known))
        for approval in self._approved:
            yield from self._approved_call(approval)
        has_programs = bool(self._open) and _has(self.request.facts.tools, frames.ProgramOpened.tool[0])
        for position, program in enumerate(self._open):
            self.request = self._transcript.continued(self.request)
            if problem := _problem_of_program(position, has_programs=has_programs):
                yield from ended(program.call_id, frames.CallFinished(problem, problem))
                continue
            recalling = self._sessions.start(_recalled(self.request, program.call_id))
            yield recalling
            call = ToolCall(*frames.ProgramOpened.tool, program.code)
            yield from self._run_program(call, program.call_id, recalling.result().calls)
        if self._open and frames.ProgramOpened.tool in map(tool_key, self.request.facts.tools.callable):
            self._meet_choice()
        self._seconds_before = self._clock() - started

    def _offer(self, tools: Toolset) -> None:
        """Give the model, and the search for tools, other tools from now on."""
        if tools is not self.request.facts.tools:
            self.request = frames.with_facts(self.request, tools=tools)
        self._sessions.tools = tools

    def _meet_choice(self) -> None:
        """Let the model answer after a call that it had to make; else every turn would have to call."""
        if self.request.facts.tools.choice == "required":
            self._offer(replace(self.request.facts.tools, choice="auto"))

    def _approved_call(self, approval: McpApprovalRequest) -> Iterator[FrameOrTask]:
        yield frames.McpCallOpened(approval.server_label, approval.name, approval.id, caller_of(approval))
        if approval.arguments:
            yield frames.ItemDelta(approval.arguments)
        if refusal := self._refusal(approval):
            yield frames.CallStarted()
            yield frames.CallFinished(error=refusal)
            yield frames.ItemClosed(complete=True)
            return
        call = ToolCall(approval.server_label, approval.name, approval.arguments)
        yield from self._sessions.call(call, self._counted()).frames(frames.ItemClosed(complete=True))

    def _refusal(self, approval: McpApprovalRequest) -> str:
        """Return why an approved call is not made; empty if it is: approval alone does not permit a call."""
        if used_by := self._used.get(approval.id):
            return f"The approval was used already, by the response {used_by}."
        key, offered = (approval.server_label, approval.name), self.request.facts.tools
        tools = (offered.in_programs or ()) if caller_of(approval) else offered.tools
        if any(isinstance(tool, McpTool) and (tool.namespace, tool.name) == key for tool in tools):
            return ""
        return "The servers of this request offer no such tool."

    # Compaction

    @property
    def asked(self) -> frames.ResolvedRequest:
        """The request of this turn."""
        match self._turn:
            case SummaryTurn():
                return frames.with_facts(self.request, purpose=replace(self.request.facts.purpose, summarizes=True))
            case PreparingTurn():
                sampling = replace(self.request.facts.sampling, max_tokens=1, min_tokens=UNSET)
                return frames.with_facts(self.request, sampling=sampling)
            case ModelTurn():
                return self.request

    @property
    def may_compact(self) -> bool:
        """True if this turn may be a compaction instead, which depends on the length of its prompt."""
        return self._threshold is not None and self.request.facts.purpose.generates and not self.is_unspoken

    def has_superseded(self) -> bool:
        """Return True if a compaction in this turn would supersede any items."""
        items = self.request.items
        return type(items[-1]) is not Compaction and would_supersede(items)

    def compact_if_full(self, prompt_tokens: int) -> bool:
        """Make this turn a compaction if its prompt has so many tokens that the request, or the context, wants one.

        Return True if it is one now.
        """
        most = self._limits.context_length * 7 // 8  # the rest is for the answer
        is_full = prompt_tokens >= min(self._threshold or most, most)
        if is_full:
            self._compact()
        return is_full

    def _compact(self) -> None:
        self._turn = SummaryTurn(self.request.facts, is_first=not self.has_begun)
        self._turns -= 1
        self.is_plain = False

    @property
    def _threshold(self) -> int | None:
        compacting = self.request.facts.purpose.compacting
        return compacting.threshold if compacting else None

    @property
    def _compacts_only(self) -> bool:
        compacting = self.request.facts.purpose.compacting
        return compacting is not None and compacting.at_once

    # Turns

    def hide(self, reasons: Mapping[str, str]) -> bool:
        """Show the model a sentence in place of images, by their URLs; False if that changes nothing.

        The client must learn of those that it sends now.
        """
        request = self.request
        said = {image.url for item in request.items if item.id in request.said for image in images_of(item)}
        if said & reasons.keys() or reasons.keys() <= request.unseen.keys():
            return False
        self.request = replace(request, unseen={**request.unseen, **reasons})
        return True

    def next_turn(self) -> bool:
        """Begin the next turn; return False if the response is over."""
        if not self._goes_on:
            return False
        self._goes_on = False
        self._turns += 1
        self._turn = ModelTurn(self._sessions.source, self._sessions.files)
        self._is_stopped = False
        self.is_plain = self._turn.is_plain
        self.request = self._transcript.continued(self.request)
        sampling = self.request.facts.sampling
        if self._tokens_left != sampling.max_tokens:
            left = replace(sampling, max_tokens=self._tokens_left)
            self.request = frames.with_facts(self.request, sampling=left)
        if not self.request.facts.purpose.generates:
            self._turn, self.is_plain = PreparingTurn(self.request.facts), False
        elif self._compacts_only:
            self._compact()
        return True

    def feed(self, frame: frames.ParsedFrame) -> Iterator[frames.ConversedFrame]:
        """Take a frame of the turn, and yield the frames that may be passed on."""
        self._is_cut = self._is_cut or self._may_cut_before(frame)
        if self._is_cut:
            self.is_plain = False
            self._turn.finished = frame if isinstance(frame, frames.TurnFinished) else None
            return iter(())
        self._is_stopped |= isinstance(frame, frames.ItemClosed) and frame.stopped
        passed = self._turn.feed(frame)
        self.is_plain = self._turn.is_plain
        return map(self.note, passed)

    def _may_cut_before(self, frame: frames.ParsedFrame) -> bool:
        """Return True if the response is steered and can end before this frame: a call would lack its output."""
        turn = self._turn
        if not isinstance(frame, frames.ItemOpened) or not isinstance(turn, ModelTurn):
            return False
        return not turn.calls and not turn.waits_for_client and self._is_steered()

    def stops_now(self) -> bool:
        """Return True, once a turn, when the engine's output begins to be dropped."""
        had_stopped, self._has_stopped = self._has_stopped, self._is_cut or self._is_stopped
        return self._has_stopped and not had_stopped

    def end_turn(self) -> Iterator[Step]:
        """Run the calls of the turn, and yield its held frames and its `TurnFinished`."""
        turn, finished, started = self._turn, self._turn.finished, self._clock()
        if isinstance(turn, SummaryTurn):
            self._goes_on = finished is not None and finished.reason == "stop" and not self._compacts_only
            return
        if isinstance(turn, PreparingTurn):
            return
        if finished is None:  # the engine's stream broke off: a later stage reports it
            return
        if self._tokens_left is not None:
            self._tokens_left -= finished.output_tokens
        reason = self._end_of(turn, finished.reason)
        yield from self._run(turn) if reason == "stop" else _cut(turn)
        if reason == "stop" and turn.may_go_on and not self.is_unspoken and self._is_steered():
            reason = "steered"
        duration = self._seconds_before + finished.duration + (self._clock() - started if turn.calls else 0.0)
        self._seconds_before = 0.0
        yield replace(finished, reason=reason, duration=duration)
        if reason == "stop":
            self._go_on(turn)

    def _end_of(self, turn: ModelTurn, reason: frames.FinishReason) -> frames.FinishReason:
        """Return how the turn ends.

        If a limit rules out another turn, no call is run, because the model would not read the results.  A call that
        exceeds ``max_tool_calls`` is refused, and the model reads why.  A call in a later turn ends the response.
        """
        if self._is_cut:
            return "steered"
        if reason != "stop" or not turn.may_go_on:
            return reason
        return "max_tool_calls" if self._has_refused else self._limit() or reason

    def _limit(self) -> frames.FinishReason | None:
        if self._tokens_left is not None and self._tokens_left <= 0:
            return "length"
        return "max_turns" if self._turns >= self._limits.turns else None

    def _run(self, turn: ModelTurn) -> Iterator[Step]:
        """Yield the held frames of a turn, running its calls.

        All of them start now if the request allows parallel calls, else one by one.
        """
        one_by_one = map(self._begun, turn.calls)
        calls = iter(list(one_by_one)) if self.request.facts.tools.parallel else one_by_one
        is_call = bool(turn.calls)
        for frame in turn.held:
            if isinstance(frame, frames.ItemClosed) and is_call and frame.complete:
                yield from next(calls).frames(frame)
            elif not isinstance(frame, frames.TurnFinished):
                yield frame
            if not isinstance(frame, frames.ItemDelta):
                is_call = isinstance(frame, frames.ServerCallOpened)

    def _begun(self, call: ToolCall) -> RunningCall | _BegunProgram:
        refusal = self._counted()
        if call.is_program:
            return _BegunProgram(call, self._run_program, self._transcript, refusal)
        return self._sessions.call(call, refusal)

    def _run_program(self, call: ToolCall, call_id: str, past: Sequence[PastCall] = ()) -> Iterator[Step]:
        """Yield the frames of a program; what runs it is not kept, as it refers to this loop."""
        tools = self.request.facts.tools
        programs = Programs(
            self._sessions, tools=tools.in_programs or (), refusal=self._counted, is_parallel=tools.parallel
        )
        yield from programs.run(call, call_id, past)
        self.is_unspoken |= programs.waits_for_client

    def _counted(self) -> str | None:
        """Count a call that is about to run; return why it may not."""
        most = self.request.facts.response.max_tool_calls
        if most is None or self._calls < most:
            self._calls += 1
            return None
        self._has_refused = True
        return f"Error: all {most} calls of tools that this response may make were made. Answer without them."

    def _go_on(self, turn: ModelTurn) -> None:
        """Schedule another turn if the model has something new to read.

        That is the results of its calls or, once per response, the error of a call that it cannot make.
        """
        if turn.calls or turn.has_async_call:
            self._goes_on = turn.may_go_on and not self.is_unspoken
            self._meet_choice()
        elif turn.ends_refused and not turn.waits_for_client and not self._has_corrected and not self._limit():
            self._has_corrected = self._goes_on = True


@dataclass(frozen=True)
class _BegunProgram:
    """A program whose turn comes after the calls before it."""

    call: ToolCall
    run: Callable[[ToolCall, str], Iterator[Step]]
    transcript: Transcript
    refusal: str | None

    def frames(self, closed: frames.ItemClosed) -> Iterator[Step]:
        """Yield its frames from the end of its text on."""
        yield closed
        call_id = self.transcript.latest_call_id
        if self.refusal:
            yield from ended(call_id, frames.CallFinished(self.refusal, self.refusal))
        else:
            yield from self.run(self.call, call_id)


def _problem_of_program(position: int, *, has_programs: bool) -> str:
    """Return why a program of the conversation does not go on, which the client may have written; or nothing."""
    if not has_programs:
        return "This request has no programs."
    if position >= MOST_PROGRAMS:
        return f"No more than {MOST_PROGRAMS} programs go on in one response."
    return ""


async def _recalled(request: frames.ResolvedRequest, call_id: str) -> Recalled:
    return Recalled(await apart(request.is_long, past_calls, request, call_id))


def _has(tools: Toolset, namespace: str) -> bool:
    return any(isinstance(tool, HostedTool) and tool.namespace == namespace for tool in tools.tools)


def _cut(turn: ModelTurn) -> Iterator[FrameOrTask]:
    """Yield the end of the first call as incomplete, if there is a call; nothing after it is passed on."""
    if turn.calls:
        yield frames.ItemClosed(complete=False)


def _cited(items: Iterable[Item]) -> tuple[str, ...]:
    """Return the kinds of tools whose calls are among ``items``, and may have found what the model cites."""
    called = {item.tool[0] for item in items if isinstance(item, ServedCall)}
    return tuple(kind.namespace for kind in kinds().values() if kind.cites and kind.namespace in called)


def _approved(conversation: Iterable[Item], given: Iterable[Item]) -> list[McpApprovalRequest]:
    """Return the approval requests that the client has granted in its input and whose calls have not been made here."""
    approvals = {item.id: item for item in of_type(conversation, McpApprovalRequest)}
    made = {item.approval_request_id for item in of_type(conversation, McpCall)}
    granted = dict.fromkeys(item.approval_request_id for item in of_type(given, McpApprovalResponse) if item.approve)
    return [approvals[approval_id] for approval_id in granted if approval_id in approvals and approval_id not in made]
