"""Check that outputs and calls belong together, and every approval to an approval request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET

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

_CHECKED = (*CALLS_OF, wire.McpApprovalResponse, wire.Program)


def is_checked(item: wire.Item) -> bool:
    """Return True for an item that needs an earlier one, and for a program."""
    return isinstance(item, _CHECKED) or getattr(item, "caller", UNSET) is not UNSET


def check_pairs(earlier: Iterable[wire.Item], input_items: Sequence[wire.Item], name: str) -> None:
    """Check the items that a body has under ``name``, and that come after the ``earlier`` items of the conversation.

    Raises `InvalidRequest` for an output without a call before it, or whose call has one already, for an approval
    without an open request, for a call of a program that is not there or has ended, and for a program that was changed
    before its end.  Of the ``input_items``, those that are in the ``earlier`` ones are known, and not checked.
    """
    pairing, known = _Pairing(), set[str]()
    for item in earlier:
        pairing.add(item)
        known.add(item.id)
    for position, item in enumerate(input_items):
        if item.id not in known:
            pairing.check(item, f"{name}[{position}]")
            pairing.add(item)
    for position, item in enumerate(input_items):
        if (
            isinstance(item, wire.Program)
            and pairing.is_open(item)
            and item.fingerprint != wire.fingerprint_of(item.code)
        ):
            message = "This program cannot go on: its code is not that of its fingerprint."
            raise InvalidRequest(message, param=f"{name}[{position}].fingerprint")


def check_answered(conversation: Iterable[wire.Item]) -> None:
    """Raise `InvalidRequest` for a call of the client's that has no output: models expect it before anything else.

    An asynchronous call has none for now, and one that was cut is not in the prompt.  A program that is to go on needs
    the answers to its approval requests, too.
    """
    rounds = _Rounds()
    unanswered: dict[tuple[type[wire.Call], str], None] = {}
    for item in conversation:
        rounds.add(item)
        if isinstance(item, wire.CallOutput):
            for kind in CALLS_OF[type(item)]:
                unanswered.pop((kind, item.call_id), None)
        elif isinstance(item, wire.Call) and not may_lack_output(item):
            unanswered[type(item), item.call_id] = None
    for kind, call_id in unanswered:
        raise InvalidRequest(f"No tool output found for {_NAMES[kind]} {shortened(call_id)}.", param="input")
    for request_id in rounds.lacking:
        message = f"No approval response found for {shortened(request_id)}: a program gets all of its answers at once."
        raise InvalidRequest(message, param="input")


class _Rounds:
    """The calls of programs that wait for answers, while a conversation goes by."""

    def __init__(self) -> None:
        self._callers: dict[str, str] = {}  # by the call_id, or the id of the approval request
        self._waiting: dict[str, dict[str, None]] = {}  # the ids of approval requests, by the caller
        self._answered = set[str]()

    def add(self, item: wire.Item) -> None:
        if caller := wire.caller_of(item):
            if isinstance(item, wire.McpApprovalRequest):
                self._callers[item.id] = caller
                self._waiting.setdefault(caller, {})[item.id] = None
                self._answered.discard(caller)
            elif isinstance(item, wire.Call):
                self._callers[item.call_id] = caller
                self._answered.discard(caller)
        if isinstance(item, wire.McpApprovalResponse | wire.CallOutput):
            answered = item.call_id if isinstance(item, wire.CallOutput) else item.approval_request_id
            caller = self._callers.get(answered, "")
            self._waiting.get(caller, {}).pop(answered, None)
            self._answered.add(caller)

    @property
    def lacking(self) -> list[str]:
        """The approval requests without an answer, of programs that have other answers."""
        return [request for caller in self._answered for request in self._waiting.get(caller, ())]


class _Pairing:
    def __init__(self) -> None:
        self._pairs = Pairs()
        self._is_answered: dict[str, bool] = {}  # by the id of the approval request
        self._is_open: dict[str, bool] = {}  # by the call_id of the program
        self._callers: dict[str, str] = {}  # by the call_id of the call

    def is_open(self, program: wire.Program) -> bool:
        """Return True if a program has no output."""
        return self._is_open[program.call_id]

    def add(self, item: wire.Item) -> None:
        self._pairs.add(item, 0)
        if isinstance(item, wire.Program | wire.ProgramOutput):
            self._is_open[item.call_id] = isinstance(item, wire.Program)
        elif isinstance(item, wire.Call):
            self._callers[item.call_id] = wire.caller_of(item)
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
        caller = getattr(item, "caller", UNSET)
        if isinstance(caller, wire.Caller) and caller.type == "program":
            self._check_caller(item, caller.caller_id or "", f"{path}.caller.caller_id")

    def _check_caller(self, item: wire.Item, caller: str, param: str) -> None:
        if isinstance(item, wire.CallOutput):
            if self._callers.get(item.call_id) != caller:
                raise InvalidRequest(f"The program {shortened(caller)!r} has not made this call.", param=param)
        elif caller not in self._is_open:
            raise InvalidRequest(f"No program with call_id {shortened(caller)!r} comes before this call.", param=param)
        elif not self._is_open[caller]:
            raise InvalidRequest(f"The program {shortened(caller)!r} has ended before this call.", param=param)
