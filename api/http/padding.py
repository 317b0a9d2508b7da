"""Random padding that hides the length of a delta in network packets: OpenAI's ``include_obfuscation``."""

from __future__ import annotations

import secrets

BLOCK = 16
"""Bytes: the length that is hidden and its padding together are a multiple of this."""


def padded(data: bytes, length: int) -> bytes:
    """Return a JSON object with padding in its last field, so that ``length`` bytes of it cannot be guessed."""
    missing = -length % BLOCK
    return b'%b,"obfuscation":"%b"}' % (data[:-1], secrets.token_urlsafe(missing)[:missing].encode())
