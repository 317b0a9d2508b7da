"""Which response a line of the log is about."""

from __future__ import annotations

from contextvars import ContextVar

current_response: ContextVar[str] = ContextVar("current_response", default="-")
"""The id of the response that this task works for; ``normalize`` sets it where it draws the id."""
