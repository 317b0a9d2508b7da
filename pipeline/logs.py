"""Which response a line of the log is about."""

from __future__ import annotations

import logging
from contextvars import ContextVar

current_response: ContextVar[str] = ContextVar("current_response", default="-")
"""The id of the response that this task works for; ``normalize`` sets it where it draws the id."""

FORMAT = "%(asctime)s %(levelname)s %(response)s %(name)s: %(message)s"
"""A line of the log, once `name_response` has been at its record."""


def name_response(record: logging.LogRecord) -> bool:
    """A filter for the handlers of a log that lets everything through, with the id of its response."""
    record.response = current_response.get()
    return True
