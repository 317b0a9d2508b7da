"""The log: its destination, and the response ids in its lines."""

from __future__ import annotations

import logging
import os
from contextvars import ContextVar

current_response: ContextVar[str] = ContextVar("current_response", default="-")
"""The id of the response that the current task works for; ``normalize`` sets it for each new response."""

FORMAT = "%(asctime)s %(levelname)s %(response)s %(name)s: %(message)s"
"""The format of a log line; `name_response` adds the field ``response``."""


def name_response(record: logging.LogRecord) -> bool:
    """Add the id of the current response to ``record``: a filter for log handlers that drops nothing."""
    record.response = current_response.get()
    return True


def log_to_stderr(level: str) -> None:
    """Write the log to stderr, vLLM's included; each line of penstock names the response that it is about."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    logging.basicConfig(level=level, format=FORMAT)
    for handler in logging.getLogger().handlers:
        handler.addFilter(name_response)
