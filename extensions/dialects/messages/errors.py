"""Errors as Anthropic writes them."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from penstock.api.http.bodies import Problem
from penstock.api.http.conventions import RequestError
from penstock.extensions.dialects.messages.events import MessageError, MessageProblem, to_sse
from penstock.pipeline.errors import UnsupportedParameter

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""Anthropic's types of errors by status; the others depend on whose mistake it is."""


THREAD_NOT_FOUND = "thread_not_found"
"""The code on which clients send the whole conversation again."""

THREAD_UNSUPPORTED = "thread_unsupported_request"
"""The code on which clients send the whole conversation, from then on without a thread."""


_STATUSES = {THREAD_NOT_FOUND: 404, "insufficient_quota": 400}
"""Anthropic's status for a code where it is another one: clients repeat what has a 429, also if no money is left."""


def problem(status: int, message: str, code: str | None, param: str | None = None) -> MessageProblem:
    """Return a problem with Anthropic's type for its status; the code of a problem of threads is a detail.

    With `THREAD_UNSUPPORTED`, so is the parameter that a thread cannot have.
    """
    details: Any = {"error_code": code} if (code or "").startswith("thread_") else UNSET
    if code == THREAD_UNSUPPORTED:
        details["unsupported"] = [param]
    return MessageProblem(_type(status, code), message, details)


def _type(status: int, code: str | None) -> str:
    if status == 503 and code == "rate_limit_exceeded":
        return "overloaded_error"
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error(refused: RequestError) -> tuple[int, Any]:
    """Return the status and the body of an error."""
    found = refused.problem
    status = _STATUSES.get(found.code or "", refused.status)
    return status, MessageError(problem(status, placed(found), found.code, found.param), refused.request_id or None)


def placed(found: Problem) -> str:
    """Return the message of a problem with its place in the body, for which Anthropic's errors have no field."""
    names_it = found.param is None or found.param in found.message
    return found.message if names_it else f"{found.message.rstrip('.')} (at {found.param})"


def fault(refused: RequestError) -> bytes:
    """Return the last event of a stream that breaks off."""
    return to_sse(error(refused)[1])


def not_permitted(place: str, tag: str | None = None) -> UnsupportedParameter:
    """Return the error for a parameter, in the words on which Anthropic's clients send the request without it.

    In Anthropic's words, a ``tag`` of the object that has the parameter stands before its name.
    """
    path = place.replace("[", ".").replace("]", "")
    if tag:
        path = f".{tag}.".join(path.rsplit(".", 1))
    return UnsupportedParameter(f"{path}: Extra inputs are not permitted", param=place)
