"""The frames that open calls, by the tools that they call."""

from __future__ import annotations

from typing import TypeAlias

from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.hosted_kinds import kinds, own_function
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, HostedTool, McpTool, Tool

CallOpened: TypeAlias = frames.ClientCallOpened | frames.ServerCallOpened


def call_of(tool: Tool) -> CallOpened:
    """Return the frame that opens a call of ``tool`` by the model."""
    match tool:
        case FunctionTool(runs_here=True):
            return frames.ToolSearchOpened()
        case FunctionTool():
            return frames.FunctionCallOpened(tool.name, tool.namespace, tool.form, tool.is_async is True)
        case CustomTool():
            return frames.CustomToolCallOpened(tool.name, tool.namespace)
        case McpTool(needs_approval=True):
            return frames.McpApprovalOpened(tool.namespace, tool.name)
        case HostedTool() if own_function(tool):
            return kinds()[tool.namespace].opened(tool.name)
        case McpTool() | HostedTool():
            return frames.McpCallOpened(tool.namespace, tool.name)


def call_by(tool: Tool, caller: str) -> CallOpened:
    """Return the frame that opens a call of ``tool`` by the program whose ``call_id`` is ``caller``."""
    opened = call_of(tool)
    if isinstance(opened, frames.ToolSearchOpened | frames.ProgramOpened):
        raise TypeError(f"programs cannot call {tool.name}")
    return replace(opened, caller=caller)
