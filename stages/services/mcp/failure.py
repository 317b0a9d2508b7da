"""Why a server could not be asked or a call failed, in words for the client, and in the forms of the API."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from penstock.stages.services.tools import Outcome

CONNECTION_CLOSED = -32000
TIMED_OUT = -32001
INVALID_PARAMS = -32602

LONGEST = 4000
"""Characters of an error that are told: it may be anything that a server says."""


class Failure(Exception):
    """What went wrong; ``form`` is how an ``mcp_call`` tells it."""

    def __init__(self, message: str, form: dict[str, Any]) -> None:
        super().__init__(message)
        self.form = form

    @property
    def outcome(self) -> Outcome:
        """The call that ended so."""
        return Outcome(error=str(self), data=(self.form,))


def protocol_failure(code: int, message: str) -> Failure:
    """The server could not be spoken with, or said no."""
    message = message[:LONGEST]
    return Failure(message, {"type": "mcp_protocol_error", "code": code, "message": message})


def http_failure(status: int) -> Failure:
    """The server answered with an HTTP status."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "unknown status"
    message = f"The server answered with HTTP {status} ({phrase})."
    return Failure(message, {"type": "http_error", "code": status, "message": message})


def tool_failure(message: str) -> Failure:
    """The tool ran, and says that it failed."""
    message = message[:LONGEST]
    return Failure(message, {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": message}]})


def too_slow(seconds: float) -> Failure:
    """The time is up."""
    return protocol_failure(TIMED_OUT, f"The server did not answer within {seconds:g} seconds.")
