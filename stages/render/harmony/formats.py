"""The answer's format, as declared to gpt-oss in the developer message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.stages.models.harmony.typescript import comment

_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def formats_section(text_format: Mapping[str, Any]) -> str:
    """The part of the developer message that declares ``text_format``; empty if the format has no schema."""
    if text_format.get("type") != "json_schema":
        return ""
    described = text_format.get("description")
    lines = [*(comment(described) if described else ()), _json(text_format.get("schema", {}))]
    return "\n".join(["# Response Formats", "", f"## {text_format.get('name', 'answer')}", "", *lines])
