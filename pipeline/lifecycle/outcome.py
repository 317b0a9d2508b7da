"""The response object at its start, after a failure and after a cancellation, and its terminal event.

``penstock.stages.emit.emit`` calls these functions if a stage before it fails, or is cancelled, once the response has
begun.  Otherwise `Run.cancel` and `Run.fail` in ``penstock.services.runs.run`` end the events early, and `StreamState`
calls them.  Any other status is that of the last turn, in ``emit``.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.errors import StageError
from penstock.pipeline.protocol.events import ResponseCompleted, ResponseFailed, ResponseIncomplete, TerminalEvent
from penstock.pipeline.protocol.items import OutputItem
from penstock.pipeline.protocol.response import ErrorDetails, Response, Usage, tool_usage_of

_NO_OUTCOME: dict[str, Any] = {
    "completed_at": None,
    "incomplete_details": None,
    "error": None,
    "output": (),
    "usage": None,
    "tool_usage": UNSET,
    "stop_reason": UNSET,
}


def begun(response: Response) -> Response:
    """Return ``response`` as it was created: without an outcome, and queued if it runs in the background."""
    messages = UNSET if response.input_messages is UNSET else None
    status = "queued" if response.background else "in_progress"
    end = {"input_messages": messages, "output_messages": messages, "generations": UNSET}
    return replace(response, status=status, **end, **_NO_OUTCOME)


def failed_response(response: Response, error: Exception, output: tuple[OutputItem, ...]) -> Response:
    """Return ``response`` failed with ``error``; the client sees the message of a `StageError` only."""
    details = (
        ErrorDetails(error.code or "invalid_prompt", error.message)  # the code of a failed response is never null
        if isinstance(error, StageError)
        else ErrorDetails("server_error", f"Internal error. The server's log names it beside {response.id}.")
    )
    return replace(response, **(_NO_OUTCOME | {"status": "failed", "error": details, "output": output}))


def cancelled_response(response: Response, output: tuple[OutputItem, ...], usage: Usage | None) -> Response:
    """Return ``response``, cancelled; ``usage`` is None if it is not known."""
    return replace(response, status="cancelled", output=output, usage=usage, tool_usage=tool_usage_of(output))


def last_event(number: int, response: Response) -> TerminalEvent:
    """Return the terminal event.

    The API has no ``response.cancelled``, so a cancelled response ends with `ResponseIncomplete`.
    """
    match response.status:
        case "completed":
            return ResponseCompleted(number, response)
        case "failed":
            return ResponseFailed(number, response)
        case _:
            return ResponseIncomplete(number, response)
