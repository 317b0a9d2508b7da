"""All checks: importing this module registers them, in the order of the page."""

from __future__ import annotations

from typing import get_args

from penstock.extensions.workbench.conformance import (
    chat,
    chat_stored,
    chat_streams,
    decisions,
    errors,
    messages,
    messages_streams,
    messages_threads,
    responses,
    responses_lifecycle,
    responses_streams,
    responses_tools,
    sdks,
)
from penstock.extensions.workbench.conformance.check import CHECKS, Area, Speech

MODULES = (
    errors,
    responses,
    responses_streams,
    responses_lifecycle,
    responses_tools,
    chat,
    chat_streams,
    chat_stored,
    messages,
    messages_streams,
    messages_threads,
    decisions,
    sdks,
)
"""The modules that register checks."""

_SPEECHES, _AREAS = get_args(Speech), get_args(Area)
ALL = sorted(CHECKS.values(), key=lambda check: (_SPEECHES.index(check.speech), _AREAS.index(check.area)))
"""All checks, by dialect and area."""
