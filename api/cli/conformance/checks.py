"""All checks: importing this module registers them, in the order of the page."""

from __future__ import annotations

from penstock.api.cli.conformance import (
    chat,
    chat_streams,
    errors,
    messages,
    messages_streams,
    responses,
    responses_lifecycle,
    responses_streams,
    responses_tools,
)
from penstock.api.cli.conformance.check import CHECKS

MODULES = (
    errors,
    responses,
    responses_streams,
    responses_lifecycle,
    responses_tools,
    chat,
    chat_streams,
    messages,
    messages_streams,
)
"""The modules that register checks."""

_AREAS = (
    *("protocol", "objects", "streams", "lifecycle", "tools", "structured output", "limits", "reasoning", "errors"),
)
_SPEECHES = ("responses", "chat", "messages")
ALL = sorted(CHECKS.values(), key=lambda check: (_SPEECHES.index(check.speech), _AREAS.index(check.area)))
"""All checks, by dialect and area."""
