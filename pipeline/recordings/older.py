"""Older layouts of frames: recordings of format 1 are still read."""

from __future__ import annotations

from typing import Any

from penstock.pipeline.frames import RequestFacts

CHANGED = frozenset({"Conversation", "Prompt", "GenerationStarted", "ResponseStarted", "CallFinished"})
"""The types of frames whose layout has changed since format 1."""


def upgraded(frame: dict[str, Any]) -> dict[str, Any]:
    """Return a frame of a type in `CHANGED`, as JSON values, in today's layout."""
    if frame["type"] == "CallFinished":
        return frame | {"data": _call_data(frame.get("data"))}
    facts: dict[str, Any] = {"sampling": {"temperature": 1.0, "top_p": 1.0, "stop": frame.get("stop", ())}, "date": ""}
    facts |= {name: frame.pop(name) for name in RequestFacts.__struct_fields__ if name in frame}
    facts["wants_raw_messages"] = frame.get("raw_messages") not in (None, False)
    if frame["type"] == "Conversation":
        frame |= {"type": "ResolvedRequest"}
    return frame | {"facts": facts}


def _call_data(data: Any) -> dict[str, Any] | None:
    """Return the data of a call with a tag; its kind was that of the open item, and the form of its parts shows it."""
    match data:
        case [{"stdout": _}, *_]:
            return {"type": "ShellOutput", "outputs": data}
        case [{"input_schema": _}, *_]:
            return {"type": "ListedTools", "tools": data}
        case [{"type": "logs" | "image"}, *_]:
            return {"type": "CodeOutputs", "outputs": data}
        case [{"type": "mcp_protocol_error" | "mcp_tool_execution_error" | "http_error"} as error]:
            return {"type": "McpError", "error": error}
        case [{"type": _} as action]:
            return {"type": "BrowserAction", "action": action}
        case _:
            return None
