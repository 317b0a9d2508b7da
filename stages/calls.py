"""Calls, as items of a conversation tell them: what all models have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from pipeline.protocol.items import Call, CodeInterpreterCall, McpApprovalRequest, McpCall, WebSearchCall

AnyCall: TypeAlias = Call | McpCall | McpApprovalRequest | CodeInterpreterCall | WebSearchCall
"""What the model writes as a call, whoever runs it."""

_BROWSER_FUNCTIONS = {"search": "search", "open_page": "open", "find_in_page": "find"}
"""The functions of the browser by the types of their actions."""


def browser_function(action: Mapping[str, Any]) -> str:
    """The function of the browser that an action is a call of."""
    return _BROWSER_FUNCTIONS.get(str(action.get("type")), "search")
