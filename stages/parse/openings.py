"""Frames that open an output item, the same for every model's markup."""

from __future__ import annotations

from typing import TypeAlias

from penstock.pipeline.frames import (
    ClientCallOpened,
    CodeCallOpened,
    CustomToolCallOpened,
    FunctionCallOpened,
    McpApprovalOpened,
    McpCallOpened,
    MessageOpened,
    ReasoningOpened,
    ServerCallOpened,
    ShellCallOpened,
    WebCallOpened,
)
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, HostedTool, McpTool, Tool, Toolset

CallOpened: TypeAlias = ClientCallOpened | ServerCallOpened

Opening: TypeAlias = ReasoningOpened | MessageOpened | CallOpened


def call_of(tool: Tool) -> CallOpened:
    """Return the frame that opens a call of ``tool``."""
    match tool:
        case FunctionTool():
            return FunctionCallOpened(tool.name, tool.namespace, tool.form)
        case CustomTool():
            return CustomToolCallOpened(tool.name, tool.namespace)
        case McpTool(needs_approval=True):
            return McpApprovalOpened(tool.namespace, tool.name)
        case McpTool():
            return McpCallOpened(tool.namespace, tool.name)
        case HostedTool(namespace="python"):
            return CodeCallOpened()
        case HostedTool(namespace="browser"):
            return WebCallOpened(tool.name)
        case HostedTool():
            return ShellCallOpened()


def is_open(tools: Toolset) -> bool:
    """Return True if ``tool_choice`` does not limit the tools.

    A call of an undeclared function then goes to the client as well: it sees the name that the model made up, and can
    answer the model that there is no such function.
    """
    return tools.choice != "none" and tools.allowed is None
