"""Tool calls as conversation items: helpers that all models share."""

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
"""An item that the model writes as a call, run by the client or by the server."""

_BROWSER_FUNCTIONS = {"search": "search", "open_page": "open", "find_in_page": "find"}
"""The browser's function for each type of ``web_search_call`` action."""


def browser_function(action: Mapping[str, Any]) -> str:
    """Return the browser function that an action calls; ``search`` for unknown types."""
    return _BROWSER_FUNCTIONS.get(str(action.get("type")), "search")


def callers_of(items: Sequence[Item]) -> dict[int, int]:
    """Map the position of each call output to the position of its call.

    That is the latest earlier call with the same ``call_id``: some clients reuse their ids in every turn.  Outputs
    without a call are left out.
    """
    latest: dict[str, int] = {}
    callers: dict[int, int] = {}
    for at, item in enumerate(items):
        if isinstance(item, Call):
            latest[item.call_id] = at
        elif isinstance(item, CallOutput) and item.call_id in latest:
            callers[at] = latest[item.call_id]
    return callers
