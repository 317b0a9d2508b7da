"""Older layouts of frames: recordings of formats 1 and 2 are still read."""

from __future__ import annotations

from typing import Any

from penstock.pipeline.frames import Purpose, RequestFacts

_WITH_FACTS = frozenset({"ResolvedRequest", "Prompt", "GenerationStarted", "ResponseStarted"})
"""The types of frames that have the facts of a request."""

CHANGED = {1: _WITH_FACTS - {"ResolvedRequest"} | {"Conversation", "CallFinished"}, 2: _WITH_FACTS}
"""The types of frames whose layout has changed since each format."""


_OPTIONS = {"web": "browser", "file_search": "file_search"}
"""The fields of the options of a tool up to format 2, each with the namespace of the tool."""

_MOVED = frozenset({*Purpose.__struct_fields__, *_OPTIONS, "containers", "hosted"})
"""The facts of format 2 that stand elsewhere now."""

_FIELDS = _MOVED.union(RequestFacts.__struct_fields__)
"""The names of the facts in any format."""


def layout_of(frame: str) -> int | None:
    """Return the format whose layout a frame in JSON may have; None if it is today's."""
    if frame.startswith('{"type":"Conversation"'):
        return 1
    return 2 if any(f'"{name}":' in frame for name in _MOVED) else None


def upgraded(frame: dict[str, Any], version: int) -> dict[str, Any]:
    """Return a frame of a type in `CHANGED`, as JSON values of the format ``version``, in today's layout."""
    if version == 2:
        return frame | {"facts": _facts(frame["facts"])}
    if frame["type"] == "CallFinished":
        return frame | {"data": _call_data(frame.get("data"))}
    facts: dict[str, Any] = {"sampling": {"temperature": 1.0, "top_p": 1.0, "stop": frame.get("stop", ())}, "date": ""}
    facts |= {name: frame.pop(name) for name in _FIELDS if name in frame}
    facts["wants_raw_messages"] = frame.get("raw_messages") not in (None, False)
    if frame["type"] == "Conversation":
        frame |= {"type": "ResolvedRequest"}
    return frame | {"facts": _facts(facts)}


def _facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of format 2, which had fields for the options of each tool and for the purpose.

    Those of today's layout stay as they are.
    """
    options = facts.get("options", {}) | facts.pop("containers", {})
    options |= {name: facts.pop(field) for field, name in _OPTIONS.items() if field in facts}
    purpose = facts.get("purpose", {})
    purpose |= {name: facts.pop(name) for name in Purpose.__struct_fields__ if name in facts}
    if "hosted" in facts:
        facts["tools"] = facts.get("tools", {}) | {"hosted": facts.pop("hosted")}
    return facts | {"options": options, "purpose": purpose}


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
