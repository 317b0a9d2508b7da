"""Response ids in the lines of the log."""

from __future__ import annotations

import logging
from contextvars import ContextVar

current_response: ContextVar[str] = ContextVar("current_response", default="-")
"""The id of the response that the current task works for; ``normalize`` sets it for each new response."""

FORMAT = "%(asctime)s %(levelname)s %(response)s %(name)s: %(message)s"
"""The format of a log line; `name_response` adds the field ``response``."""


def name_response(record: logging.LogRecord) -> bool:
    """Add the id of the current response to ``record``: a filter for log handlers that drops nothing."""
    record.response = current_response.get()
    return True
