"""Check that outputs and calls belong together, and every approval to an approval request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.pairs import CALLS_OF, Pairs, may_lack_output
from penstock.pipeline.protocol.params.json_body import shortened

_NAMES: dict[type[wire.Call], str] = {
    wire.FunctionCall: "function call",
    wire.CustomToolCall: "custom tool call",
    wire.LocalShellCall: "local shell call",
    wire.ShellCall: "shell call",
    wire.ApplyPatchCall: "patch call",
    wire.ToolSearchCall: "tool search call",
    wire.ComputerCall: "computer call",
    wire.Program: "program",
}
"""The names of calls in error messages."""

ANSWERS = (*CALLS_OF, wire.McpApprovalResponse)
"""The items that need an earlier one."""


def check_pairs(earlier: Iterable[wire.Item], input_items: Sequence[wire.Item], name: str) -> None:
    """Check the items that a body has under ``name``, and that come after the ``earlier`` items of the conversation.

    Raises `InvalidRequest` for an output without a call before it, or whose call has one already, and for an approval
    without an open request.  Of the ``input_items``, those that are in the ``earlier`` ones are known, and not checked.
    """
    pairing, known = _Pairing(), set[str]()
    for item in earlier:
        pairing.add(item)
        known.add(item.id)
    for position, item in enumerate(input_items):
        if item.id not in known:
            pairing.check(item, f"{name}[{position}]")
            pairing.add(item)


def check_answered(conversation: Iterable[wire.Item]) -> None:
    """Raise `InvalidRequest` for a call of the client's that has no output: models expect it before anything else.

    An asynchronous call has none for now, and one that was cut is not in the prompt.
    """
    unanswered: dict[tuple[type[wire.Call], str], None] = {}
    for item in conversation:
        if isinstance(item, wire.CallOutput):
            for kind in CALLS_OF[type(item)]:
                unanswered.pop((kind, item.call_id), None)
        elif isinstance(item, wire.Call) and not may_lack_output(item):
            unanswered[type(item), item.call_id] = None
    for kind, call_id in unanswered:
        raise InvalidRequest(f"No tool output found for {_NAMES[kind]} {shortened(call_id)}.", param="input")


class _Pairing:
    def __init__(self) -> None:
        self._pairs = Pairs()
        self._is_answered: dict[str, bool] = {}  # by the id of the approval request

    def add(self, item: wire.Item) -> None:
        self._pairs.add(item, 0)
        if isinstance(item, wire.McpApprovalRequest):
            self._is_answered[item.id] = False
        elif isinstance(item, wire.McpApprovalResponse | wire.McpCall) and item.approval_request_id:
            self._is_answered[item.approval_request_id] = True

    def check(self, item: wire.Item, path: str) -> None:
        if isinstance(item, wire.CallOutput):
            name, call_id = _NAMES[CALLS_OF[type(item)][0]], shortened(item.call_id)
            if not self._pairs.knows_call_of(item):
                message = f"No {name} with call_id {call_id!r} comes before this output."
                raise InvalidRequest(message, param=f"{path}.call_id")
            if not self._pairs.awaits(item):
                message = f"The {name} with call_id {call_id!r} has an output already."
                raise InvalidRequest(message, param=f"{path}.call_id")
        elif isinstance(item, wire.McpApprovalResponse):
            request, param = shortened(item.approval_request_id), f"{path}.approval_request_id"
            is_answered = self._is_answered.get(item.approval_request_id)
            if is_answered is None:
                raise InvalidRequest(f"No approval request {request!r} comes before this response.", param=param)
            if is_answered:
                raise InvalidRequest(f"The approval request {request!r} is answered already.", param=param)
