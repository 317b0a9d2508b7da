"""Calls and what came of them, as gpt-oss reads them.

The built-in tools are called on the analysis channel, in the form ``code``, as the model was taught; all others on
commentary.  What a call gave the model to read is told word for word where it is known, and else as its item shows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.protocol.items import (
    CallOutput,
    CodeInterpreterCall,
    CustomToolCall,
    FormCall,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    ShellCall,
    ShellCallOutput,
    WebSearchCall,
)
from stages.calls import AnyCall
from stages.harmony import FUNCTIONS, recipient_of
from stages.render.message import Channel, HarmonyMessage

_UNKNOWN = f"{FUNCTIONS}.unknown"
"""The tool of an output whose call is gone, with a response that the store no longer has: the model may still read
what it returned."""

_FORGOTTEN = "The result of this call is no longer known."
_NOT_APPROVED = "The user did not approve of this call"

_json = json.JSONEncoder(ensure_ascii=False).encode


def called(call: AnyCall) -> HarmonyMessage:
    """The message with which the model makes ``call``."""
    return HarmonyMessage(
        "assistant",
        (_arguments(call),),
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
    reason = f"{_NOT_APPROVED}: {response.reason}" if response.reason else f"{_NOT_APPROVED}."
    return called(request), returned(request, reason)


def _is_built_in(call: AnyCall) -> bool:
    return isinstance(call, CodeInterpreterCall | WebSearchCall) or (isinstance(call, ShellCall) and call.runs_here)


def _channel(call: AnyCall) -> Channel:
    return "analysis" if _is_built_in(call) else "commentary"


# What the model wrote, or would have written


def _arguments(call: AnyCall) -> str:
    match call:
        case WebSearchCall(action=action):
            return _json(_browsed(action))
        case ShellCall(runs_here=True, action=action):
            return _json(_executed(action))
        case _:
            return call.text


def _browsed(action: Mapping[str, Any]) -> dict[str, Any]:
    match action.get("type"):
        case "open_page":
            return {"id": action["url"]} if action.get("url") else {}
        case "find_in_page":
            return {"pattern": action.get("pattern", "")}
        case _:
            return {"query": action.get("query") or "; ".join(map(str, action.get("queries") or ()))}


def _executed(action: Mapping[str, Any]) -> dict[str, Any]:
    commands = "\n".join(map(str, action.get("commands") or ()))
    limit = {"timeout": action["timeout_ms"]} if action.get("timeout_ms") else {}
    return {"cmd": ["bash", "-lc", commands], **limit}


# What it reads, as far as the item shows it


def result_of(call: McpCall | CodeInterpreterCall | WebSearchCall) -> str:
    """What came of a call that the server made."""
    match call:
        case McpCall():
            return call.output or "" if call.error is None else _error(call.error)
        case CodeInterpreterCall():
            logs = [str(output["logs"]) for output in call.outputs or () if output.get("logs")]
            return _joined(logs) if call.outputs else _FORGOTTEN
        case WebSearchCall():
            return _joined(_sources(call.action)) or _FORGOTTEN


def output_of(output: CallOutput, call: AnyCall | None) -> str:
    """What came of a call that the client made, or the shell of the sandbox."""
    if isinstance(output, ShellCallOutput) and isinstance(call, ShellCall) and call.runs_here:
        return _joined(part for ran in output.output for part in _ran(ran))
    return output.text


def _ran(ran: Mapping[str, Any]) -> Iterable[str]:
    """What one command wrote, and how it ended where that was not well."""
    yield from (str(ran[stream]) for stream in ("stdout", "stderr") if ran.get(stream))
    outcome = ran.get("outcome")
    match outcome:
        case {"type": "timeout"}:
            yield "The command took too long."
        case {"exit_code": int(code)} if code:
            yield f"The command ended with exit code {code}."
        case _:
            pass


def _error(error: Mapping[str, Any]) -> str:
    """The text of an error, of whichever form."""
    content = error.get("content") or error.get("message") or ""
    if isinstance(content, list | tuple):
        return _joined(str(part["text"]) for part in content if isinstance(part, Mapping) and part.get("text"))
    return content if isinstance(content, str) else _json(content)


def _sources(action: Mapping[str, Any]) -> Iterable[str]:
    sources = action.get("sources") or ()
    return (str(source["url"]) for source in sources if isinstance(source, Mapping) and source.get("url"))


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(line.removesuffix("\n") for line in lines)
