"""The programs of a response: each goes on in rounds of calls, which are items between it and its output.

The calls of this server run at once, and those of the client end the response.  The next response that has all of their
outputs lets the program go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.pipeline import frames
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.pairs import callers_of
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, McpTool, Tool, tool_key
from penstock.services.tools import NestedCall, PastCall
from penstock.stages.converse.sessions import FAILURE, RunningCall, RunningProgram, Sessions, Step
from penstock.stages.converse.turn import ToolCall, output_of
from penstock.stages.models import call_results, output_items
from penstock.stages.models.opened_calls import call_by

AT_ONCE = 16
"""Calls of a round that this server runs at once."""


@dataclass
class Programs:
    """The programs of a response that run one after another.

    ``refusal`` counts a call that this server is about to run, and returns why it may not; ``tools`` are those that
    programs may call.
    """

    sessions: Sessions
    tools: Sequence[Tool]
    refusal: Callable[[], str | None]
    is_parallel: bool = True
    waits_for_client: bool = field(default=False, init=False)
    """True if a program waits for the client."""

    def run(self, program: ToolCall, call_id: str, past: Sequence[PastCall] = ()) -> Iterator[Step]:
        """Yield the frames of a program from its end as an item, or from where its ``past`` calls have left it."""
        done = list(past)
        with self.sessions.program(program, call_id) as running:
            while True:
                going = self.sessions.advance(running, tuple(done))
                yield going
                advanced = going.result()
                if not advanced.calls:
                    break
                yield from self._round(running, advanced.calls, done)
                if len(done) < len(past) + len(advanced.calls):
                    self.sessions.keep(running, tuple(done))
                    self.waits_for_client = True
                    return
                past = tuple(done)
        yield from ended(call_id, advanced.finished)

    def _round(self, program: RunningProgram, calls: Sequence[NestedCall], done: list[PastCall]) -> Iterator[Step]:
        """Yield the frames of calls, and append those that are done, which the client has not to act for."""
        known = {tool_key(tool): tool for tool in self.tools}
        at_once = AT_ONCE if self.is_parallel else 1
        for start in range(0, len(calls), at_once):
            begun = [self._begun(known.get(call.tool), call, program) for call in calls[start : start + at_once]]
            for opened, call, running in begun:
                if opened is None:
                    done.append(PastCall(call, error="There is no such tool any more."))
                    continue
                yield opened
                if call.arguments:
                    yield frames.ItemDelta(call.arguments)
                if running is None:
                    yield frames.ItemClosed(complete=True)
                    if not self.is_parallel:
                        return
                    continue
                yield from running.frames(frames.ItemClosed(complete=True))
                done.append(_past(opened, call, running))

    def _begun(
        self, tool: Tool | None, call: NestedCall, program: RunningProgram
    ) -> tuple[frames.Opened | None, NestedCall, RunningCall | None]:
        """Begin a call; return it with the frame that opens it, and None if the client has to act.

        There is no frame if the tools of the request have changed since the program got its own.
        """
        if tool is None:
            return None, call, None
        opened = call_by(tool, program.call_id)
        if isinstance(tool, FunctionTool | CustomTool):
            self.sessions.ask_client(program)
            return opened, call, None
        if isinstance(tool, McpTool) and tool.needs_approval:
            self.sessions.ask_client(program, tool.namespace)
            return opened, call, None
        assert isinstance(opened, frames.ServerCallOpened)
        made = ToolCall(tool.namespace, tool.name, call.arguments, output_of(opened))
        return opened, call, self.sessions.call(made, self.refusal(), program)


def ended(call_id: str, finished: frames.CallFinished) -> Iterator[Step]:
    """Yield the frames of the output of a program."""
    yield frames.ProgramOutputOpened(call_id)
    yield frames.CallStarted()
    yield finished
    yield frames.ItemClosed(complete=True)


def _past(opened: frames.Opened, call: NestedCall, running: RunningCall) -> PastCall:
    """Return the outcome of a call: the same as `past_calls` finds in its item, for a program that runs again."""
    outcome = running.outcome
    finished = outcome.result() if isinstance(outcome, asyncio.Task) else outcome
    assert isinstance(finished, frames.CallFinished)
    has_run_commands = isinstance(finished.data, frames.ShellOutput)
    if has_run_commands or (finished.error is None and finished.ran):
        return PastCall(call, finished.result)
    is_shown = isinstance(opened, frames.McpCallOpened) and finished.ran
    error = finished.error or "" if is_shown else finished.result.removeprefix(FAILURE)
    return PastCall(call, finished.result, error.removesuffix("\n"))


# The programs of a conversation

_WITHOUT_TEXT = (items.WebSearchCall, items.FileSearchCall, items.ShellCall)
"""The items of calls that show an action in place of their arguments."""


def open_programs(request: frames.ResolvedRequest) -> list[items.Program]:
    """Return the programs without an output to whose calls the input of the request has outputs or approvals."""
    whole = request.items
    programs = {item.call_id: item for item in items.of_type(whole, items.Program)}
    if not programs:
        return []
    for output in items.of_type(whole, items.ProgramOutput):
        programs.pop(output.call_id, None)
    given = {item.id for item in request.facts.input}
    callers = callers_of(whole)
    asked = {item.id: items.caller_of(item) for item in items.of_type(whole, items.McpApprovalRequest)}
    answered = set[str]()
    for at, item in enumerate(whole):
        if item.id not in given:
            continue
        if at in callers:
            answered.add(items.caller_of(whole[callers[at]]))
        elif isinstance(item, items.McpApprovalResponse):
            answered.add(asked.get(item.approval_request_id, ""))
    return [program for call_id, program in programs.items() if call_id in answered]


def past_calls(request: frames.ResolvedRequest, call_id: str) -> list[PastCall]:
    """Return the calls of a program in a conversation that have an outcome, in their order."""
    whole = request.items
    outputs = {at: whole[output] for output, at in callers_of(whole).items()}
    approved = {item.approval_request_id: item for item in items.of_type(whole, items.McpCall)}
    refused = call_results.refusals_in(whole)
    found = []
    for at, item in enumerate(whole):
        if items.caller_of(item) != call_id or not isinstance(item, items.CallItem):
            continue
        call = NestedCall(item.tool, "" if isinstance(item, _WITHOUT_TEXT) else item.text)
        if isinstance(item, items.McpApprovalRequest):
            if item.id in refused:
                found.append(PastCall(call, error=refused[item.id]))
            elif made := approved.get(item.id):
                found.append(_outcome(call, made, None, request))
        elif not (isinstance(item, items.McpCall) and item.approval_request_id):
            found.append(_outcome(call, item, outputs.get(at), request))
    return found


def _outcome(call: NestedCall, item: items.CallItem, output: Item | None, request: frames.ResolvedRequest) -> PastCall:
    known = request.results.get(output.id if output else item.id)
    if isinstance(output, items.ShellCallOutput):
        has_failed = known is not None and _is_failure(output, known)
    elif isinstance(output, items.CallOutput):
        text = known or call_results.output_of(output, item)
        has_failed = isinstance(output, items.FunctionCallOutput) and output.status == "incomplete"
        return PastCall(call, text, text if has_failed else None)
    elif not isinstance(item, items.ServedCall):
        return PastCall(call, error="This call has no output.")
    elif known is None and isinstance(item, items.McpCall) and item.status in ("completed", "failed"):
        shown = call_results.result_of(item)
        return PastCall(call, shown, None if item.error is None else shown)
    else:
        has_failed = item.status != "completed"
    if known is None or not has_failed:
        return PastCall(call, known)
    return PastCall(call, error=known.removeprefix(FAILURE).removesuffix("\n"))


def _is_failure(output: items.ShellCallOutput, known: str) -> bool:
    """Return True if a shell could run no command, so that its output has the error alone."""
    match output.output:
        case ():
            return known.startswith(FAILURE)
        case ({"stderr": str(error), "outcome": {"exit_code": output_items.NOT_EXECUTED}},):
            return error.removeprefix(FAILURE) == known.removeprefix(FAILURE)
        case _:
            return False
