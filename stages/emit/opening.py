"""The choice of an item's ladder by the frame that opens it."""

from __future__ import annotations

from penstock.pipeline.frames import (
    ClientCallOpened,
    CodeCallOpened,
    CustomToolCallOpened,
    FunctionCallOpened,
    McpApprovalOpened,
    McpCallOpened,
    McpListToolsOpened,
    MessageOpened,
    Opened,
    ReasoningOpened,
    RefusalOpened,
    ServedOpened,
    ShellCallOpened,
    ShellOutputOpened,
    WebCallOpened,
)
from penstock.stages.emit.calls import (
    OpenCustomToolCall,
    OpenFunctionCall,
    OpenLocalShellCall,
    OpenPatch,
    OpenShellCall,
)
from penstock.stages.emit.ladder import OpenItem, OpenMessage, OpenReasoning, OpenRefusal, OpenSummary, Place
from penstock.stages.emit.served import OpenCodeCall, OpenMcpApproval, OpenMcpCall, OpenMcpListTools, OpenWebCall
from penstock.stages.emit.shell import OpenSandboxCall, OpenShellOutput


def open_item(opening: Opened, place: Place, *, summarised: bool) -> OpenItem:
    """Return the item that ``opening`` begins; if ``summarised``, reasoning is written as a summary."""
    match opening:
        case ReasoningOpened():
            return OpenSummary(place) if summarised else OpenReasoning(place)
        case MessageOpened(phase):
            return OpenMessage(place, phase)
        case RefusalOpened():
            return OpenRefusal(place)
        case FunctionCallOpened() | CustomToolCallOpened() | McpApprovalOpened():
            return _client_call(opening, place)
        case _:
            return _served(opening, place)


def _client_call(opening: ClientCallOpened, place: Place) -> OpenItem:
    """Return a call that the client has to run or approve."""
    match opening:
        case FunctionCallOpened(form="local_shell"):
            return OpenLocalShellCall(place)
        case FunctionCallOpened(form="shell"):
            return OpenShellCall(place)
        case FunctionCallOpened(form="apply_patch"):
            return OpenPatch(place)
        case FunctionCallOpened():
            return OpenFunctionCall(place, opening)
        case CustomToolCallOpened():
            return OpenCustomToolCall(place, opening)
        case McpApprovalOpened():
            return OpenMcpApproval(place, opening)


def _served(opening: ServedOpened, place: Place) -> OpenItem:
    """Return an item of a server-side tool."""
    match opening:
        case McpListToolsOpened():
            return OpenMcpListTools(place, opening)
        case McpCallOpened():
            return OpenMcpCall(place, opening)
        case CodeCallOpened():
            return OpenCodeCall(place)
        case WebCallOpened():
            return OpenWebCall(place)
        case ShellCallOpened():
            return OpenSandboxCall(place)
        case ShellOutputOpened():
            return OpenShellOutput(place)
