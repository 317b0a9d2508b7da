"""Output items, built from the frames of a turn: one builder per opening frame.

``emit`` writes these items to the client, and ``converse`` appends them to the next prompt, with the same ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.lifecycle.item_lifecycles import LIFECYCLES, NO_ACTION, NOT_LISTED, ItemLifecycle, Part
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.items import CallStatus, ItemStatus, Logprob, OutputItem
from penstock.pipeline.protocol.response import item_key
from penstock.pipeline.protocol.tools import ClientForm
from penstock.stages.models import client_actions
from penstock.stages.models.shell_calls import ArgumentsInvalid, shell_action

NOT_EXECUTED = 126
"""The exit code of POSIX shells for a command that cannot be executed."""


@dataclass(slots=True)
class Draft:
    """An output item that is being made, with all that the frames have brought of it."""

    opening: frames.Opened
    key: str
    """The suffix of its ids."""
    container_id: str
    """The id of the container of its call, if it has one."""
    answered_id: str | None = None
    """The id of the latest call before it whose output is an item of its own."""
    is_shown: bool = True
    """True if the client sees the item; False if it is only for the model, which reads the result of a call instead."""
    is_summarised: bool = False
    """True if reasoning is shown as a summary."""
    written: StringIO = field(default_factory=StringIO)
    """The text so far.  Python keeps a list of its pieces in it up to 3.11, which takes nine times as much memory."""
    logprobs: list[Logprob] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    encrypted_content: str | UnsetType = UNSET
    """The sealed text, if it is sealed."""
    started: frames.CallStarted | None = None
    finished: frames.CallFinished | None = None

    _joined: tuple[int, str] = (0, "")

    @property
    def text(self) -> str:
        """The text so far, joined only once: several closing events hold it, and can then share one string."""
        if self._joined[0] != self.written.tell():
            self._joined = self.written.tell(), self.written.getvalue()
        return self._joined[1]

    def forget_text(self) -> None:
        """Begin the text anew."""
        self.written, self._joined = StringIO(), (0, "")

    @property
    def part(self) -> Part | None:
        """The part that holds the text, or None if a field of the item holds it."""
        match self.opening:
            case frames.ReasoningOpened():
                return items.SummaryText(self.text) if self.is_summarised else items.ReasoningText(self.text)
            case frames.MessageOpened():
                return items.OutputText(self.text, tuple(self.annotations), tuple(self.logprobs))
            case frames.RefusalOpened():
                return items.Refusal(self.text)
            case _:
                return None

    @property
    def lifecycle(self) -> ItemLifecycle:
        """The lifecycle of the item."""
        return LIFECYCLES[type(self.item("in_progress"))]

    @property
    def hidden_result(self) -> str | None:
        """The text that the model reads as the result of the call or as a compaction, if the item does not show it."""
        if isinstance(self.opening, frames.CompactionOpened):
            return self.text
        finished = self.finished
        return finished.result if finished and (self.lifecycle.hides_result or not finished.ran) else None

    @property
    def call_id(self) -> str:
        """The ``call_id`` of the item."""
        return f"call_{self.key}"

    def item(self, status: CallStatus) -> OutputItem:
        """Return the item with this status; while it is in progress, it has no parts."""
        return BUILDERS[type(self.opening)](self.opening, self, status)

    def final_status(self, status: ItemStatus) -> CallStatus:
        """Return the final status: the outcome of a call that this server runs, or else ``status``."""
        lifecycle = self.lifecycle
        if not lifecycle.runs:
            return status
        if self.finished is None:
            return "incomplete"
        if not self.finished.ran:
            return "in_progress"
        return "failed" if self.finished.error is not None and "failed" in lifecycle.statuses else "completed"

    def settle(self, *, complete: bool) -> None:
        """End the text of the item, which becomes another item if its text does not make it what it was opened as.

        A request for approval whose arguments were cut becomes a call that never ran.  A call of the client's shell or
        patches that has no action becomes a thought, which no client executes.
        """
        match self.opening:
            case frames.McpApprovalOpened(label, name) if not complete:
                self.opening = frames.McpCallOpened(label, name, caller=self.opening.caller)
            case frames.FunctionCallOpened(name, form=form) if form != "function":
                if problem := client_actions.problem_of(form, self.text):
                    self.opening = frames.ReasoningOpened(name, problem)
            case _:
                pass


class Drafts:
    """State machine: the drafts of a response.  Ids derive from its id and their order, so a replay repeats them."""

    __slots__ = ("_answered_id", "_count", "_facts", "_is_shown", "_is_summarised", "_response_id")

    def __init__(self, facts: frames.RequestFacts, *, is_shown: bool) -> None:
        response = facts.response
        self._facts = facts
        self._response_id = response.id
        self._is_shown = is_shown
        self._is_summarised = is_shown and response.reasoning.summary is not None
        self._count = 0
        self._answered_id: str | None = None

    def begin(self, opening: frames.Opened) -> Draft:
        """Return the draft of the next item."""
        key = item_key(self._response_id, self._count)
        container_id = ""
        if isinstance(opening, frames.CodeCallOpened | frames.ShellCallOpened):
            container_id = self._facts.container(opening.tool[0]).id
        draft = Draft(
            opening,
            key=key,
            container_id=container_id,
            answered_id=self._answered_id,
            is_shown=self._is_shown,
            is_summarised=self._is_summarised,
        )
        self._count += 1
        is_shell = isinstance(opening, frames.FunctionCallOpened) and opening.form == "shell"
        if is_shell or isinstance(opening, frames.ShellCallOpened | frames.ToolSearchOpened):
            self._answered_id = draft.call_id
        return draft


def _reasoning(opening: frames.ReasoningOpened, draft: Draft, status: ItemStatus) -> items.Reasoning:
    parts: Any = () if status == "in_progress" else (draft.part,)
    item_id, sealed = items.Reasoning.new_id(draft.key), draft.encrypted_content
    if draft.is_summarised:
        return items.Reasoning(item_id, summary=parts, content=(), encrypted_content=sealed, status=status)
    return items.Reasoning(item_id, content=parts, encrypted_content=sealed, status=status)


def _message(opening: frames.MessageOpened | frames.RefusalOpened, draft: Draft, status: ItemStatus) -> items.Message:
    parts: Any = () if status == "in_progress" else (draft.part,)
    phase = opening.phase if isinstance(opening, frames.MessageOpened) else "final_answer"  # a refusal ends the answer
    return items.Message(
        items.Message.new_id(draft.key), status=status, role="assistant", content=parts, phase=phase or UNSET
    )


def _computer_call(item_id: str, call_id: str, action: dict[str, Any], status: ItemStatus) -> items.ComputerCall:
    return items.ComputerCall(item_id, call_id, status, **action)


_CLIENT_CALLS: dict[ClientForm, Any] = {
    "local_shell": items.LocalShellCall,
    "shell": items.ShellCall,
    "apply_patch": items.ApplyPatchCall,
    "tool_search": partial(items.ToolSearchCall, execution="client"),
    "computer": _computer_call,
    "computer_use_preview": _computer_call,
}


def _function_call(opening: frames.FunctionCallOpened, draft: Draft, status: ItemStatus) -> OutputItem:
    if opening.form == "function":
        namespace = UNSET if opening.namespace is None else opening.namespace
        item_id, is_async = items.FunctionCall.new_id(draft.key), True if opening.is_async else UNSET
        return items.FunctionCall(
            item_id,
            call_id=draft.call_id,
            name=opening.name,
            arguments=draft.text,
            status=status,
            namespace=namespace,
            is_async=is_async,
            caller=items.caller_named(opening.caller),
        )
    build = _CLIENT_CALLS[opening.form]
    call: items.FormCall = build("", draft.call_id, _action(opening.form, draft), status)
    return replace(call, id=call.new_id(draft.key))


def _action(form: ClientForm, draft: Draft) -> dict[str, Any]:
    """Return the action of a call; empty while its text is not whole: the client sees it only once it is settled."""
    try:
        return client_actions.action_of(form, draft.text)
    except ArgumentsInvalid:
        return {}


def _tool_search(opening: frames.ToolSearchOpened, draft: Draft, status: ItemStatus) -> items.ToolSearchCall:
    item_id = items.ToolSearchCall.new_id(draft.key)
    return items.ToolSearchCall(
        item_id, call_id=draft.call_id, arguments=_action("tool_search", draft), status=status, execution="server"
    )


def _tool_search_output(
    opening: frames.ToolSearchOutputOpened, draft: Draft, status: ItemStatus
) -> items.ToolSearchOutput:
    data = draft.finished.data if draft.finished else None
    tools = data.tools if isinstance(data, frames.LoadedTools) else ()
    return items.ToolSearchOutput(
        items.ToolSearchOutput.new_id(draft.key),
        call_id=_answered(draft),
        tools=tools,
        status=status,
        execution="server",
    )


def _answered(draft: Draft) -> str:
    """Return the id of the call that an item has the output of."""
    if draft.answered_id is None:
        raise RuntimeError("an output has no call")
    return draft.answered_id


def _custom_call(opening: frames.CustomToolCallOpened, draft: Draft, status: ItemStatus) -> items.CustomToolCall:
    namespace = UNSET if opening.namespace is None else opening.namespace
    item_id = items.CustomToolCall.new_id(draft.key)
    return items.CustomToolCall(
        item_id,
        call_id=draft.call_id,
        name=opening.name,
        input=draft.text,
        status=status,
        namespace=namespace,
        caller=items.caller_named(opening.caller),
    )


def _program(opening: frames.ProgramOpened, draft: Draft, status: ItemStatus) -> items.Program:
    item_id, code = items.Program.new_id(draft.key), draft.text
    return items.Program(item_id, call_id=draft.call_id, code=code, fingerprint=items.fingerprint_of(code))


def _program_output(opening: frames.ProgramOutputOpened, draft: Draft, status: ItemStatus) -> items.ProgramOutput:
    finished, item_id = draft.finished, items.ProgramOutput.new_id(draft.key)
    if finished is None:
        return items.ProgramOutput(item_id, opening.call_id, "", "incomplete")
    return items.ProgramOutput(
        item_id, opening.call_id, finished.result, "completed" if finished.error is None else "incomplete"
    )


def _mcp_list_tools(opening: frames.McpListToolsOpened, draft: Draft, status: CallStatus) -> items.McpListTools:
    item_id = items.McpListTools.new_id(draft.key)
    if status == "in_progress":
        return items.McpListTools(item_id, opening.server_label, ())
    if draft.finished is None:
        return items.McpListTools(item_id, opening.server_label, (), NOT_LISTED)
    data = draft.finished.data
    tools = data.tools if isinstance(data, frames.ListedTools) else ()
    return items.McpListTools(item_id, opening.server_label, tools, draft.finished.error or UNSET)


def _mcp_call(opening: frames.McpCallOpened, draft: Draft, status: CallStatus) -> items.McpCall:
    finished = draft.finished
    return items.McpCall(
        items.McpCall.new_id(draft.key),
        server_label=opening.server_label,
        name=opening.name,
        arguments=draft.text,
        status=status,
        output=finished.result if finished and finished.ran and finished.error is None else None,
        error=frames.mcp_error(finished) if finished and finished.error is not None else None,
        approval_request_id=opening.approval_request_id,
        caller=items.caller_named(opening.caller),
    )


def _mcp_approval(opening: frames.McpApprovalOpened, draft: Draft, status: ItemStatus) -> items.McpApprovalRequest:
    item_id = items.McpApprovalRequest.new_id(draft.key)
    return items.McpApprovalRequest(
        item_id,
        server_label=opening.server_label,
        name=opening.name,
        arguments=draft.text,
        caller=items.caller_named(opening.caller),
    )


def _code_call(opening: frames.CodeCallOpened, draft: Draft, status: CallStatus) -> items.CodeInterpreterCall:
    item_id, caller = items.CodeInterpreterCall.new_id(draft.key), items.caller_named(opening.caller)
    if not draft.is_shown:
        return items.CodeInterpreterCall(item_id, code=draft.text, container_id="", status=status, caller=caller)
    data = draft.finished.data if draft.finished else None
    outputs = data.outputs if isinstance(data, frames.CodeOutputs) else ()
    return items.CodeInterpreterCall(
        item_id,
        code=draft.text,
        container_id=draft.container_id,
        status=status,
        outputs=outputs or None,
        caller=caller,
    )


def _web_call(opening: frames.WebCallOpened, draft: Draft, status: CallStatus) -> items.WebSearchCall:
    item_id = items.WebSearchCall.new_id(draft.key)
    data = draft.finished.data if draft.finished and draft.is_shown else None
    running_action = draft.started.action if draft.started else None
    action = data.action if isinstance(data, frames.BrowserAction) else running_action or dict(NO_ACTION)
    results = data.results if isinstance(data, frames.BrowserAction) else UNSET
    return items.WebSearchCall(
        item_id, status=status, action=action, results=results, caller=items.caller_named(opening.caller)
    )


def _file_search(opening: frames.FileSearchOpened, draft: Draft, status: CallStatus) -> items.FileSearchCall:
    item_id, caller = items.FileSearchCall.new_id(draft.key), items.caller_named(opening.caller)
    data = draft.finished.data if draft.finished and draft.is_shown else None
    if isinstance(data, frames.FileSearchResults):
        return items.FileSearchCall(item_id, queries=data.queries, status=status, results=data.results, caller=caller)
    asked = (draft.started.action or {}).get("queries", ()) if draft.started else ()
    return items.FileSearchCall(item_id, queries=tuple(asked), status=status, caller=caller)


def _shell_call(opening: frames.ShellCallOpened, draft: Draft, status: ItemStatus) -> items.ShellCall:
    environment = {"type": "container_reference"} | ({"container_id": draft.container_id} if draft.is_shown else {})
    item_id = items.ShellCall.new_id(draft.key)
    return items.ShellCall(
        item_id,
        call_id=draft.call_id,
        action=shell_action(draft.text),
        status=status,
        environment=environment,
        caller=items.caller_named(opening.caller),
    )


def _shell_output(opening: frames.ShellOutputOpened, draft: Draft, status: ItemStatus) -> items.ShellCallOutput:
    finished = draft.finished
    outputs = finished.data.outputs if finished and isinstance(finished.data, frames.ShellOutput) else ()
    if finished and finished.error is not None and not outputs and draft.is_shown:  # no shell could run any command
        error = finished.error
        outputs = ({"stdout": "", "stderr": error, "outcome": {"type": "exit", "exit_code": NOT_EXECUTED}},)
    return items.ShellCallOutput(items.ShellCallOutput.new_id(draft.key), _answered(draft), outputs, status)


def _compaction(opening: frames.CompactionOpened, draft: Draft, status: ItemStatus) -> items.Compaction:
    sealed = "" if status == "in_progress" else draft.encrypted_content or ""
    return items.Compaction(items.Compaction.new_id(draft.key), sealed)


BUILDERS: dict[type[frames.Opened], Callable[[Any, Draft, Any], OutputItem]] = {
    frames.ReasoningOpened: _reasoning,
    frames.MessageOpened: _message,
    frames.RefusalOpened: _message,
    frames.FunctionCallOpened: _function_call,
    frames.CustomToolCallOpened: _custom_call,
    frames.McpListToolsOpened: _mcp_list_tools,
    frames.McpCallOpened: _mcp_call,
    frames.McpApprovalOpened: _mcp_approval,
    frames.CodeCallOpened: _code_call,
    frames.WebCallOpened: _web_call,
    frames.FileSearchOpened: _file_search,
    frames.ShellCallOpened: _shell_call,
    frames.ShellOutputOpened: _shell_output,
    frames.ToolSearchOpened: _tool_search,
    frames.ToolSearchOutputOpened: _tool_search_output,
    frames.ProgramOpened: _program,
    frames.ProgramOutputOpened: _program_output,
    frames.CompactionOpened: _compaction,
}
"""The builder of the item for each opening frame: it takes the frame, the draft and the status."""
