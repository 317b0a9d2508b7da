"""Answers: match outputs to calls, and the client's approvals to approval requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.items import (
    ApplyPatchCall,
    ApplyPatchCallOutput,
    CallOutput,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    LocalShellCall,
    LocalShellCallOutput,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    ShellCall,
    ShellCallOutput,
)
from penstock.pipeline.protocol.params.json_body import shortened

_ANSWERED: dict[type[CallOutput], tuple[type[Item], ...]] = {
    FunctionCallOutput: (FunctionCall, LocalShellCall),  # some clients answer a local shell call with a function output
    CustomToolCallOutput: (CustomToolCall,),
    LocalShellCallOutput: (LocalShellCall,),
    ShellCallOutput: (ShellCall,),
    ApplyPatchCallOutput: (ApplyPatchCall,),
}
_NAMES: dict[type[CallOutput], str] = {
    FunctionCallOutput: "function call",
    CustomToolCallOutput: "custom tool call",
    LocalShellCallOutput: "local shell call",
    ShellCallOutput: "shell call",
    ApplyPatchCallOutput: "patch call",
}


@dataclass
class Answers:
    """A check over the items of a conversation, one after another."""

    _calls: set[tuple[type[Item], str]] = field(default_factory=set)
    """The calls so far, by kind and call_id."""
    _asked: dict[str, bool] = field(default_factory=dict)
    """The approval requests so far, by id; the value is True if the request has been answered."""

    def add(self, item: Item) -> None:
        """Record an item."""
        match item:
            case FunctionCall() | CustomToolCall() | LocalShellCall() | ShellCall() | ApplyPatchCall():
                self._calls.add((type(item), item.call_id))
            case McpApprovalRequest():
                self._asked[item.id] = False
            case McpApprovalResponse(approval_request_id=request_id) | McpCall(approval_request_id=str(request_id)):
                self._asked[request_id] = True
            case _:
                pass

    def check(self, item: Item, path: str) -> None:
        """Raise `InvalidRequest` for an item at ``path`` that answers no earlier item, or for a repeated approval."""
        match item:
            case McpApprovalResponse(approval_request_id=request_id):
                self._check_approval(request_id, f"{path}.approval_request_id")
            case (
                FunctionCallOutput()
                | CustomToolCallOutput()
                | LocalShellCallOutput()
                | ShellCallOutput()
                | ApplyPatchCallOutput()
            ):
                self._check_output(item, path)
            case _:
                pass

    def _check_output(self, item: CallOutput, path: str) -> None:
        if not any((kind, item.call_id) in self._calls for kind in _ANSWERED[type(item)]):
            message = f"No {_NAMES[type(item)]} with call_id {shortened(item.call_id)!r} comes before this output."
            raise InvalidRequest(message, param=f"{path}.call_id")

    def _check_approval(self, request_id: str, param: str) -> None:
        if request_id not in self._asked:
            raise InvalidRequest(
                f"No approval request {shortened(request_id)!r} comes before this response.", param=param
            )
        if self._asked[request_id]:
            raise InvalidRequest(f"The approval request {shortened(request_id)!r} is answered already.", param=param)
