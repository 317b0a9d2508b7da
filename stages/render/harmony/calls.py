"""Tool calls and their results, as messages that gpt-oss reads.

Built-in tools are called on the analysis channel with the content type ``code``, as in gpt-oss's training.  All other
tools are called on the commentary channel.
"""

from __future__ import annotations

from penstock.pipeline.protocol.items import (
    CodeInterpreterCall,
    CustomToolCall,
    FormCall,
    McpApprovalRequest,
    McpApprovalResponse,
    ShellCall,
    WebSearchCall,
)
from penstock.stages.models.call_pairs import AnyCall
from penstock.stages.models.harmony.vocabulary import FUNCTIONS, recipient_of
from penstock.stages.render.harmony.message import Channel, HarmonyMessage
from penstock.stages.render.texts import arguments_of, refusal_of

_UNKNOWN = f"{FUNCTIONS}.unknown"
"""The tool name for an output whose call is gone, because the store no longer has the call's response.  The model still
reads the output."""


def called(call: AnyCall) -> HarmonyMessage:
    """The message with which the model makes ``call``."""
    return HarmonyMessage(
        "assistant",
        (arguments_of(call),),
        _channel(call),
        recipient=recipient_of(call),
        content_type="code" if _is_built_in(call) or isinstance(call, CustomToolCall) else "json",
        rebuilt=isinstance(call, FormCall | WebSearchCall),
    )


def returned(call: AnyCall | None, text: str) -> HarmonyMessage:
    """The message in which the model reads ``text``, the output of ``call``; None if the call is gone."""
    if call is None:
        return HarmonyMessage("tool", (text,), "commentary", name=_UNKNOWN, recipient="assistant")
    return HarmonyMessage("tool", (text,), _channel(call), name=recipient_of(call), recipient="assistant")


def refused(request: McpApprovalRequest, response: McpApprovalResponse) -> tuple[HarmonyMessage, HarmonyMessage]:
    """A call that the client did not approve, and the refusal that the model reads instead of an output."""
    return called(request), returned(request, refusal_of(response))


def _is_built_in(call: AnyCall) -> bool:
    return isinstance(call, CodeInterpreterCall | WebSearchCall) or (isinstance(call, ShellCall) and call.runs_here)


def _channel(call: AnyCall) -> Channel:
    return "analysis" if _is_built_in(call) else "commentary"
