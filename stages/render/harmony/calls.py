"""Calls and what came of them, as gpt-oss reads them.

The built-in tools are called on the analysis channel, in the form ``code``, as the model was taught; all others on
commentary.
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
"""The tool of an output whose call is gone, with a response that the store no longer has: the model may still read
what it returned."""


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
    """The message in which the model reads ``text``, the output of ``call``; None is one that is gone."""
    if call is None:
        return HarmonyMessage("tool", (text,), "commentary", name=_UNKNOWN, recipient="assistant")
    return HarmonyMessage("tool", (text,), _channel(call), name=recipient_of(call), recipient="assistant")


def refused(request: McpApprovalRequest, response: McpApprovalResponse) -> tuple[HarmonyMessage, HarmonyMessage]:
    """A call that the client did not approve of, and what the model reads instead of its output."""
    return called(request), returned(request, refusal_of(response))


def _is_built_in(call: AnyCall) -> bool:
    return isinstance(call, CodeInterpreterCall | WebSearchCall) or (isinstance(call, ShellCall) and call.runs_here)


def _channel(call: AnyCall) -> Channel:
    return "analysis" if _is_built_in(call) else "commentary"
