"""Pairs of calls and outputs: find the call that an output belongs to, by kind and ``call_id``."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from penstock.pipeline.protocol import items

CALLS_OF: Mapping[type[items.CallOutput], tuple[type[items.Call], ...]] = {
    # some clients answer a local shell call with the output of a function
    items.FunctionCallOutput: (items.FunctionCall, items.LocalShellCall),
    items.CustomToolCallOutput: (items.CustomToolCall,),
    items.LocalShellCallOutput: (items.LocalShellCall,),
    items.ShellCallOutput: (items.ShellCall,),
    items.ApplyPatchCallOutput: (items.ApplyPatchCall,),
    items.ToolSearchOutput: (items.ToolSearchCall,),
    items.ComputerCallOutput: (items.ComputerCall,),
    items.ProgramOutput: (items.Program,),
}
"""The kinds of calls that an output of each kind may belong to."""

_Key: TypeAlias = tuple[type[items.Item], str]


class Pairs:
    """The calls of a conversation, with those that wait for an output.

    An output belongs to the first waiting call with its kind and ``call_id``: some clients reuse their ids in every
    turn.  A call that may lack an output waits until the next call with its id.
    """

    def __init__(self) -> None:
        self._waiting: dict[_Key, deque[tuple[int, items.Call]]] = {}
        self._latest: dict[_Key, int] = {}

    def add(self, item: items.Item, at: int) -> int | None:
        """Take the item at position ``at``; return the position of the call that it is an output of, if there is one.

        An output of a call that has one already belongs to the latest call with its id.
        """
        if isinstance(item, items.Call):
            self._call(item, at)
        elif isinstance(item, items.CallOutput):
            return self._answer(item)
        return None

    def knows_call_of(self, output: items.CallOutput) -> bool:
        """Return True if there is a call that ``output`` may belong to, waiting or not."""
        return any(key in self._latest for key in _keys(output))

    def awaits(self, output: items.CallOutput) -> bool:
        """Return True if a call waits for ``output``."""
        return any(self._waiting.get(key) for key in _keys(output))

    def _call(self, call: items.Call, at: int) -> None:
        key = (type(call), call.call_id)
        waiting = self._waiting.setdefault(key, deque())
        if waiting and may_lack_output(waiting[-1][1]):
            waiting.pop()
        waiting.append((at, call))
        self._latest[key] = at

    def _answer(self, output: items.CallOutput) -> int | None:
        for key in _keys(output):
            if waiting := self._waiting.get(key):
                at, call = waiting[0]
                if not _may_have_more(call):
                    waiting.popleft()
                return at
        return next((self._latest[key] for key in _keys(output) if key in self._latest), None)


def callers_of(history: Sequence[items.Item]) -> dict[int, int]:
    """Map the position of each output to the position of its call.  Outputs without a call are left out."""
    pairs = Pairs()
    found = {at: pairs.add(item, at) for at, item in enumerate(history)}
    return {at: caller for at, caller in found.items() if caller is not None}


def behind_calls(history: Sequence[items.Item]) -> tuple[items.Item, ...]:
    """Return the items with each output right behind its call.

    An output without a call stays where it is, and so does that of an asynchronous call.
    """
    outputs: dict[int, list[int]] = {}
    for at, caller in callers_of(history).items():
        if not _may_have_more(history[caller]):
            outputs.setdefault(caller, []).append(at)
    moved = {at for group in outputs.values() for at in group}
    order = (each for at in range(len(history)) if at not in moved for each in (at, *outputs.get(at, ())))
    return tuple(history[at] for at in order)


def may_lack_output(call: items.Call) -> bool:
    """Return True for a call that the model goes on without: cut, asynchronous, or run by this server."""
    match call:
        case (
            items.FunctionCall(is_async=True)
            | items.ShellCall(runs_here=True)
            | items.ToolSearchCall(execution="server")
            | items.Program()
        ):
            return True
        case _:
            return call.status == "incomplete"


def _may_have_more(call: items.Item) -> bool:
    """Return True for a call with any number of outputs."""
    return isinstance(call, items.FunctionCall) and call.is_async is True


def _keys(output: items.CallOutput) -> list[_Key]:
    return [(kind, output.call_id) for kind in CALLS_OF[type(output)]]
