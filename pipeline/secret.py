"""Secrets: what travels with a request and is never written down.

A `Secret` is written as nothing wherever a frame is written, a recording or the store's queue, and shows nothing in a
log or a traceback: whoever needs one has it from the request itself, in this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Secret:
    """Headers for a server of tools; equal to any other, so that a frame read again is the frame that was written."""

    __slots__ = ("_headers",)

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self._headers = dict(headers or {})

    def reveal(self) -> dict[str, str]:
        """The headers, for the one who sends them."""
        return dict(self._headers)

    def __repr__(self) -> str:
        return "Secret()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret)

    def __hash__(self) -> int:
        return hash(Secret)


def unwritten(value: Any) -> Any:
    """What msgspec writes for a `Secret` (its ``enc_hook``)."""
    if isinstance(value, Secret):
        return None
    raise NotImplementedError(f"objects of type {type(value).__name__} are not written")


def unread(kind: type, value: Any) -> Any:
    """What msgspec reads for a `Secret` (its ``dec_hook``)."""
    if kind is Secret:
        if value is None:
            return Secret()
        raise ValueError("a secret stands where none is written")
    raise NotImplementedError(f"objects of type {kind.__name__} are not read")
