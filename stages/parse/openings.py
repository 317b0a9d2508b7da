"""What opens an item: the call of a tool, whatever the markup in which a model calls it."""

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
    """What a call of ``tool`` is."""
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
    """Whether nothing limits the choice.

    Then a function that nobody declared is called as well: the client gets to see the name that the model made up, and
    can tell it so.
    """
    return tools.choice != "none" and tools.allowed is None
