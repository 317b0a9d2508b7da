"""Calls and what came of them as texts: what a model of any kind wrote, and what it reads.

What a call gave the model to read is told word for word where that is known, and else as its item shows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.pipeline.protocol.items import (
    AdditionalTools,
    CallOutput,
    CodeInterpreterCall,
    Item,
    McpApprovalResponse,
    McpCall,
    Message,
    ShellCall,
    ShellCallOutput,
    WebSearchCall,
)
from penstock.stages.models.call_pairs import AnyCall

_FORGOTTEN = "The result of this call is no longer known."
_NOT_APPROVED = "The user did not approve of this call"

json_text = json.JSONEncoder(ensure_ascii=False).encode


def is_leading(item: Item) -> bool:
    """Whether an item that comes before anything else is more instructions, or declares more tools."""
    return isinstance(item, AdditionalTools) or (isinstance(item, Message) and item.role in {"system", "developer"})


def refusal_of(response: McpApprovalResponse) -> str:
    """What the model reads of a call that the client did not approve of."""
    return f"{_NOT_APPROVED}: {response.reason}" if response.reason else f"{_NOT_APPROVED}."


def arguments_of(call: AnyCall) -> str:
    """What the model wrote to call, or would have written."""
    match call:
        case WebSearchCall(action=action):
            return json_text(_browsed(action))
        case ShellCall(runs_here=True, action=action):
            return json_text(_executed(action))
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
    return content if isinstance(content, str) else json_text(content)


def _sources(action: Mapping[str, Any]) -> Iterable[str]:
    sources = action.get("sources") or ()
    return (str(source["url"]) for source in sources if isinstance(source, Mapping) and source.get("url"))


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(line.removesuffix("\n") for line in lines)
