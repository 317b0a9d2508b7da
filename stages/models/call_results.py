"""The results of calls as texts, rebuilt from items.

Callers prefer the exact text that was read, if it is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.pipeline.protocol import items

_FORGOTTEN = "The result of this call is no longer known."

_NOT_APPROVED = "The user did not approve of this call"

_json_text = json.JSONEncoder(ensure_ascii=False).encode


def refusals_in(history: Iterable[items.Item]) -> dict[str, str]:
    """Map the ids of approval requests that the client refused to the texts that the model reads as results."""
    return {
        item.approval_request_id: f"{_NOT_APPROVED}: {item.reason}" if item.reason else f"{_NOT_APPROVED}."
        for item in history
        if isinstance(item, items.McpApprovalResponse) and not item.approve
    }


def result_of(call: items.ServedCall) -> str:
    """Return the result of a call that the server made."""
    match call:
        case items.McpCall():
            return call.output or "" if call.error is None else _error(call.error)
        case items.CodeInterpreterCall():
            logs = [str(output["logs"]) for output in call.outputs or () if output.get("logs")]
            return _joined(logs) if call.outputs else _FORGOTTEN
        case items.WebSearchCall():
            return _joined(_sources(call.action or {})) or _FORGOTTEN
        case items.FileSearchCall():
            found = [f"{result.get('filename') or ''}\n{result.get('text') or ''}" for result in call.results or ()]
            return _joined(found) or _FORGOTTEN
        case _:
            return _FORGOTTEN


def output_of(output: items.CallOutput, call: items.CallItem | None) -> str:
    """Return the output of a call that the client or the sandbox's shell ran."""
    if isinstance(output, items.ShellCallOutput) and isinstance(call, items.ShellCall) and call.runs_here:
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
    return content if isinstance(content, str) else _json_text(content)


def _sources(action: Mapping[str, Any]) -> Iterable[str]:
    sources = action.get("sources") or ()
    return (str(source["url"]) for source in sources if isinstance(source, Mapping) and source.get("url"))


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(line.removesuffix("\n") for line in lines)
