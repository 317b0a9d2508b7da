"""Errors of MCP servers and calls: a message for the client, and the error object of the OpenAI API."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from penstock.pipeline.frames import McpError
from penstock.services.tools import ToolResult

CONNECTION_CLOSED = -32000
TIMED_OUT = -32001
INVALID_PARAMS = -32602

LONGEST = 4000
"""Maximum characters of an error message.  A server may send a message of any length."""


class McpFailure(Exception):
    """An MCP server or call failed; ``form`` is the error object of an ``mcp_call`` item."""

    def __init__(self, message: str, form: dict[str, Any]) -> None:
        super().__init__(message)
        self.form = form

    @property
    def outcome(self) -> ToolResult:
        return ToolResult(error=str(self), data=McpError(self.form))


def protocol_failure(code: int, message: str) -> McpFailure:
    """Return the failure of a server that cannot be reached, breaks the protocol or refuses; ``code`` is JSON-RPC's."""
    message = message[:LONGEST]
    return McpFailure(message, {"type": "mcp_protocol_error", "code": code, "message": message})


def http_failure(status: int) -> McpFailure:
    """Return the failure for an HTTP error status."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "unknown status"
    message = f"The server answered with HTTP {status} ({phrase})."
    return McpFailure(message, {"type": "http_error", "code": status, "message": message})


def tool_failure(message: str) -> McpFailure:
    """Return the failure for a tool that ran and reported an error."""
    message = message[:LONGEST]
    return McpFailure(message, {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": message}]})


def too_slow(seconds: float) -> McpFailure:
    """Return the failure for a server that exceeded the time limit."""
    return protocol_failure(TIMED_OUT, f"The server did not answer within {seconds:g} seconds.")
