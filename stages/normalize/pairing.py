"""Check that outputs and calls belong together, and every approval to an approval request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.params.json_body import shortened

_PAIRS: dict[type[wire.CallOutput], tuple[str, tuple[type[wire.Call], ...]]] = {
    # some clients answer a local shell call with the output of a function
    wire.FunctionCallOutput: ("function call", (wire.LocalShellCall, wire.FunctionCall)),
    wire.CustomToolCallOutput: ("custom tool call", (wire.CustomToolCall,)),
    wire.LocalShellCallOutput: ("local shell call", (wire.LocalShellCall,)),
    wire.ShellCallOutput: ("shell call", (wire.ShellCall,)),
    wire.ApplyPatchCallOutput: ("patch call", (wire.ApplyPatchCall,)),
}
"""The calls that an output may belong to, and the name of the last kind of them in an error message."""

ANSWERS = (*_PAIRS, wire.McpApprovalResponse)
"""The items that need an earlier one."""


def check_pairs(earlier: Iterable[wire.Item], input_items: Sequence[wire.Item], name: str) -> None:
    """Check the items that a body has under ``name``, and that come after the ``earlier`` items of the conversation.

    Raises `InvalidRequest` for an output without a call before it, and for an approval without an open request.
    """
    pairing = _Pairing()
    for item in earlier:
        pairing.add(item)
    for position, item in enumerate(input_items):
        pairing.check(item, f"{name}[{position}]")
        pairing.add(item)


def check_answered(conversation: Iterable[wire.Item]) -> None:
    """Raise `InvalidRequest` for a call of the client's that has no output: models expect it before anything else.

    An asynchronous call has none for now, and one that was cut is not in the prompt.
    """
    unanswered: dict[tuple[type[wire.Item], str], None] = {}
    for item in conversation:
        if isinstance(item, wire.CallOutput):
            for kind in _PAIRS[type(item)][1]:
                unanswered.pop((kind, item.call_id), None)
        elif isinstance(item, wire.Call) and not _may_lack_output(item):
            unanswered[type(item), item.call_id] = None
    for call, call_id in unanswered:
        name = next(name for name, kinds in _PAIRS.values() if kinds[-1] is call)
        raise InvalidRequest(f"No tool output found for {name} {shortened(call_id)}.", param="input")


def _may_lack_output(call: wire.Call) -> bool:
    match call:
        case wire.FunctionCall(is_async=True) | wire.ShellCall(runs_here=True):
            return True
        case _:
            return call.status == "incomplete"


class _Pairing:
    def __init__(self) -> None:
        self._calls: set[tuple[type[wire.Item], str]] = set()
        self._is_answered: dict[str, bool] = {}  # by the id of the approval request

    def add(self, item: wire.Item) -> None:
        if isinstance(item, wire.Call):
            self._calls.add((type(item), item.call_id))
        elif isinstance(item, wire.McpApprovalRequest):
            self._is_answered[item.id] = False
        elif isinstance(item, wire.McpApprovalResponse | wire.McpCall) and item.approval_request_id:
            self._is_answered[item.approval_request_id] = True

    def check(self, item: wire.Item, path: str) -> None:
        if isinstance(item, wire.CallOutput):
            name, kinds = _PAIRS[type(item)]
            if not any((kind, item.call_id) in self._calls for kind in kinds):
                message = f"No {name} with call_id {shortened(item.call_id)!r} comes before this output."
                raise InvalidRequest(message, param=f"{path}.call_id")
        elif isinstance(item, wire.McpApprovalResponse):
            request, param = shortened(item.approval_request_id), f"{path}.approval_request_id"
            is_answered = self._is_answered.get(item.approval_request_id)
            if is_answered is None:
                raise InvalidRequest(f"No approval request {request!r} comes before this response.", param=param)
            if is_answered:
                raise InvalidRequest(f"The approval request {request!r} is answered already.", param=param)
