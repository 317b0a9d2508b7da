"""The part of a conversation that is left to read after it was compacted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

from penstock.pipeline.protocol.items import (
    AdditionalTools,
    Call,
    CallOutput,
    Compaction,
    ConfigurationUpdate,
    Item,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    McpListTools,
    Message,
    Program,
    caller_of,
    of_type,
)

KEPT_CHARACTERS = 40_000
"""The most characters of users' messages that stay of a stored history.  The latest message stays whole."""


_PAIRED = frozenset({*get_args(Call), *get_args(CallOutput), McpApprovalRequest, McpApprovalResponse, McpCall})
"""Types of items that belong together; `isinstance` takes ten times as long to reject an item."""


def unsuperseded(history: Sequence[Item], input_items: Sequence[Item]) -> tuple[Item, ...]:
    """Return the items that the model reads: the latest compaction, what follows it, and little of what precedes it.

    Of the items before it, the messages of users, developers and systems stay, tools, and calls that are still open.
    The calls of an open program stay with their outcomes, without which it could not go on.
    All messages stay that the client itself has sent again beside the compaction.
    """
    whole = (*history, *input_items)
    at = next((at for at in reversed(range(len(whole))) if type(whole[at]) is Compaction), None)
    if at is None:
        return whole
    open_calls = _open_calls(whole)
    stay = {position for position in range(at) if _stays(whole[position], open_calls)}
    left, is_latest = KEPT_CHARACTERS, True
    for position in reversed(range(min(at, len(history)))):
        item = whole[position]
        if isinstance(item, Message) and item.role == "user":
            left -= len(item.text)
            if left < 0 and not is_latest:
                stay.discard(position)
            is_latest = False
    return (*(whole[position] for position in sorted(stay)), *whole[at:])


def would_supersede(items: Iterable[Item]) -> bool:
    """Return True if a compaction after these items would supersede any of them, and not a compaction alone."""
    listed = tuple(items)
    open_calls = _open_calls(listed)
    return any(not _stays(item, open_calls) and type(item) is not Compaction for item in listed)


def _stays(item: Item, open_calls: frozenset[str]) -> bool:
    match item:
        case Message():
            return item.role != "assistant"
        case AdditionalTools() | ConfigurationUpdate() | McpListTools():
            return True
        case _:
            return item.id in open_calls


def _open_calls(items: Sequence[Item]) -> frozenset[str]:
    """Return the ids of the calls without an output, and of the approval requests without an answer.

    With those of an open program are all the items of its calls.
    """
    paired = [item for item in items if type(item) in _PAIRED]
    answered = frozenset(_answered(paired))
    found = [
        item
        for item in paired
        if (isinstance(item, Call) and item.call_id not in answered)
        or (isinstance(item, McpApprovalRequest) and item.id not in answered)
    ]
    programs = {program.call_id for program in of_type(found, Program)}
    nested = [item for item in items if caller_of(item) in programs] if programs else []
    asked = {item.call_id if isinstance(item, Call) else item.id for item in nested}
    answers = (item for item in paired if not asked.isdisjoint(_answered((item,)))) if asked else ()
    return frozenset(item.id for item in (*found, *nested, *answers))


def _answered(items: Iterable[Item]) -> Iterator[str]:
    for item in items:
        if isinstance(item, CallOutput):
            yield item.call_id
        elif isinstance(item, McpApprovalResponse | McpCall) and item.approval_request_id:
            yield item.approval_request_id
