"""Requests that ask for the ids of tokens, which their clients have not done."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

LONGEST = 4 * 2**20
"""Bytes of a body from which on it passes unchanged: reading a longer one would hold the event loop for too long."""

FIELD = b'"return_token_ids":true'


class _Body(msgspec.Struct):
    return_token_ids: msgspec.Raw | UnsetType = UNSET


def asking(body: bytes) -> bytes:
    """Return a body that asks for the ids of tokens; the same one if it is no JSON object, or has the field."""
    try:
        if msgspec.json.decode(body, type=_Body).return_token_ids is not UNSET:
            return body
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    before, _, after = body.partition(b"{")
    return b"%b{%b%b%b" % (before, FIELD, b"" if after.lstrip().startswith(b"}") else b",", after)
