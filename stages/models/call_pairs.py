"""Calls, as items of a conversation tell them: what all models have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from penstock.pipeline.protocol.items import (
    Call,
    CallOutput,
    CodeInterpreterCall,
    Item,
    McpApprovalRequest,
    McpCall,
    WebSearchCall,
)

AnyCall: TypeAlias = Call | McpCall | McpApprovalRequest | CodeInterpreterCall | WebSearchCall
"""What the model writes as a call, whoever runs it."""

_BROWSER_FUNCTIONS = {"search": "search", "open_page": "open", "find_in_page": "find"}
"""The functions of the browser by the types of their actions."""


def browser_function(action: Mapping[str, Any]) -> str:
    """The function of the browser that an action is a call of."""
    return _BROWSER_FUNCTIONS.get(str(action.get("type")), "search")


def callers_of(items: Sequence[Item]) -> dict[int, int]:
    """For the position of each output that of the call that it answers.

    It is the latest one before it with the same ``call_id``, as some clients count their calls anew in each turn.
    """
    latest: dict[str, int] = {}
    callers: dict[int, int] = {}
    for at, item in enumerate(items):
        if isinstance(item, Call):
            latest[item.call_id] = at
        elif isinstance(item, CallOutput) and item.call_id in latest:
            callers[at] = latest[item.call_id]
    return callers
