"""The lines of the audit log: who did what to which object, from where, and by which rule it was allowed or refused.

They are made of the records of the access log, and of what stages and rules decide.  None has a text of a request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import msgspec

from penstock.pipeline.protocol.params.json_body import shortened

VERBS = {
    "cancel": "cancel",
    "chunks": "read",
    "compact": "create",
    "complete": "complete",
    "content": "read",
    "count_tokens": "count",
    "input_tokens": "count",
    "results": "read",
    "search": "search",
}
"""The last words of routes that say what is done to the object before them."""

METHODS = {"DELETE": "delete", "GET": "list", "HEAD": "list", "PATCH": "update", "POST": "create", "PUT": "update"}
"""The actions on a collection, by the method of a request; one of its objects is read or updated instead."""

_OF_ONE = {"create": "update", "list": "read"}

_BASES = frozenset({"v1", "openresponses"})
"""The words of routes that name an API."""

_COPIED = ("key", "owner", "team", "refused_key", "client", "api", "model", "request_id", "response_id", "ended")
"""The fields of the access log that a line has as well."""

_BITS = 64
"""Bits of the numbers that JSON here cannot have any more."""

LONGEST_ID = 100
"""Characters of an id in a line, which is what a client wrote into a URL."""


def action_of(method: str, route: str) -> tuple[str, str]:
    """Return what a request does, and to which kind of object, such as ``cancel`` and ``responses``.

    A kind is the words of its route, such as ``vector_stores/files``.
    """
    *before, last = words = [word for word in route.split("/") if word and word not in _BASES] or ["/"]
    is_one = last.startswith("{")
    named = before if last in VERBS and before else words
    action = VERBS[last] if named is before else METHODS.get(method, "other")
    if is_one:
        action = _OF_ONE.get(action, action)
    return action, "/".join(word for word in named if not word.startswith("{"))


def ids_of(route: str, path: str) -> dict[str, str]:
    """Return the ids in the path of a request, by their names in its route."""
    pairs = zip(reversed(route.split("/")), reversed(path.split("/")), strict=False)  # a prefix may stand before
    return {name.strip("{}"): value[:LONGEST_ID] for name, value in pairs if name.startswith("{")}


def line_of_request(record: logging.LogRecord) -> bytes | None:
    """Return the line about a record of the access log; None for one that is about no request."""
    fields = vars(record)
    status, route, method = fields.get("status"), fields.get("route"), fields.get("method")
    if not (isinstance(status, int) and isinstance(route, str) and isinstance(method, str)):
        return None
    action, kind = action_of(method, route)
    if "ended" not in fields:  # a response of a WebSocket
        action = "create"
    elif status == HTTPStatus.SWITCHING_PROTOCOLS:
        action = "connect"
    code = fields.get("code")
    line = {
        "time": _time(record),
        "action": action,
        "object": kind,
        "decision": _decision(status, fields.get("response_status")),
        "rule": code,
        "status": status,
        **{name: fields.get(name) for name in _COPIED},
        **ids_of(route, str(fields.get("path"))),
    }
    if status == HTTPStatus.TOO_MANY_REQUESTS:  # it names the limit or the budget, and quotes no client
        line["reason"] = fields.get("reason")
    return _encoded(line)


def line_of_decision(record: logging.LogRecord) -> bytes | None:
    """Return the line about what a stage, a tool or a rule has decided; None for another record."""
    decided = getattr(record, "audit", None)
    if not isinstance(decided, Mapping):
        return None
    facts = {str(name): _fact(value) for name, value in decided.items()}
    return _encoded({"time": _time(record), "action": "decide", **facts})


def _decision(status: int, response_status: object) -> str:
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or response_status == "failed":
        return "failed"
    return "refused" if HTTPStatus.BAD_REQUEST <= status < 499 else "allowed"  # 499: the client left


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _fact(value: object) -> str | float | bool | None:
    """Return a fact as a name or a number: a stage of an operator may give anything."""
    if isinstance(value, int) and value.bit_length() >= _BITS:
        return shortened(hex(value))
    return value if isinstance(value, int | float | None) else shortened(str(value))


def _encoded(line: Mapping[str, Any]) -> bytes:
    known = {
        name: value.encode(errors="replace").decode() if isinstance(value, str) else value  # half a surrogate pair
        for name, value in line.items()
        if value is not None
    }
    return msgspec.json.encode(known) + b"\n"
