"""Older layouts of frames: recordings of format 1 are still read."""

from __future__ import annotations

from typing import Any

import msgspec

CHANGED = frozenset({"CallFinished"})
"""The types of frames whose layout has changed since format 1."""


def upgraded(line: bytes) -> bytes:
    """Rewrite a frame of a type in `CHANGED` in today's layout.  Raise `msgspec.DecodeError` if it is not JSON."""
    fields: dict[str, Any] = msgspec.json.decode(line)
    data = fields.get("data")
    return msgspec.json.encode(fields | {"data": _call_data(data)}) if isinstance(data, list) else line


def _call_data(data: list[Any]) -> dict[str, Any] | None:
    """Return the data of a call, whose kind was that of the open item, with a tag; the form of its parts shows it."""
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
