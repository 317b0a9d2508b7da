"""Secrets: values that travel with a request and are never written.

A `Secret` is written as null with its frame, in a recording or in the store's queue, and shows nothing in a log or a
traceback.  Only the process that received the request has the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Secret:
    """Headers for an MCP server.

    All secrets are equal, so that a frame that is read back equals the frame that was written.
    """

    __slots__ = ("_headers",)

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self._headers = dict(headers or {})

    def reveal(self) -> dict[str, str]:
        """Return the headers, for sending them."""
        return dict(self._headers)

    def __repr__(self) -> str:
        return "Secret()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret)

    def __hash__(self) -> int:
        return hash(Secret)


def unwritten(value: Any) -> Any:
    """Encode a `Secret` as null (msgspec's ``enc_hook``)."""
    if isinstance(value, Secret):
        return None
    raise NotImplementedError(f"objects of type {type(value).__name__} are not written")


def unread(kind: type, value: Any) -> Any:
    """Decode null as an empty `Secret` (msgspec's ``dec_hook``); raise `ValueError` for any other value."""
    if kind is Secret:
        if value is None:
            return Secret()
        raise ValueError("unexpected value in place of a secret")
    raise NotImplementedError(f"objects of type {kind.__name__} are not read")


def plain_json(value: object) -> Any:
    """Return a value as its JSON is read, without secrets: in dicts and lists, unlike `msgspec.to_builtins`."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=unwritten))
