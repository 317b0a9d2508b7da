"""Tool calls and their results as text, for models of any kind.

The functions here rebuild a result from its item.  Callers prefer the exact text that the model read, if it is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.pipeline.protocol.items import (
    AdditionalTools,
    CallItem,
    CallOutput,
    CodeInterpreterCall,
    Item,
    McpApprovalResponse,
    McpCall,
    Message,
    ServedCall,
    ShellCall,
    ShellCallOutput,
    WebSearchCall,
)

_FORGOTTEN = "The result of this call is no longer known."
_NOT_APPROVED = "The user did not approve of this call"

json_text = json.JSONEncoder(ensure_ascii=False).encode


def is_leading(item: Item) -> bool:
    """Return True if an item at the start of a conversation only adds instructions or declares tools."""
    return isinstance(item, AdditionalTools) or (isinstance(item, Message) and item.role in {"system", "developer"})


def refusal_of(response: McpApprovalResponse) -> str:
    """Return the text that the model reads as the result of a call that the client did not approve."""
    return f"{_NOT_APPROVED}: {response.reason}" if response.reason else f"{_NOT_APPROVED}."


def arguments_of(call: CallItem) -> str:
    """Return the arguments of ``call`` as the model wrote them, or an equivalent in the model's own form."""
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


def result_of(call: ServedCall) -> str:
    """Return the result of a call that the server made."""
    match call:
        case McpCall():
            return call.output or "" if call.error is None else _error(call.error)
        case CodeInterpreterCall():
            logs = [str(output["logs"]) for output in call.outputs or () if output.get("logs")]
            return _joined(logs) if call.outputs else _FORGOTTEN
        case WebSearchCall():
            return _joined(_sources(call.action)) or _FORGOTTEN


def output_of(output: CallOutput, call: CallItem | None) -> str:
    """Return the output of a call that the client or the sandbox's shell ran."""
    if isinstance(output, ShellCallOutput) and isinstance(call, ShellCall) and call.runs_here:
        return _joined(part for ran in output.output for part in _ran(ran))
    return output.text


def _ran(ran: Mapping[str, Any]) -> Iterable[str]:
    """Yield the output of one command and, if it failed, a sentence about how it ended."""
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
    """Return the text of an error, in any of the API's forms."""
    content = error.get("content") or error.get("message") or ""
    if isinstance(content, list | tuple):
        return _joined(str(part["text"]) for part in content if isinstance(part, Mapping) and part.get("text"))
    return content if isinstance(content, str) else json_text(content)


def _sources(action: Mapping[str, Any]) -> Iterable[str]:
    sources = action.get("sources") or ()
    return (str(source["url"]) for source in sources if isinstance(source, Mapping) and source.get("url"))


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(line.removesuffix("\n") for line in lines)
