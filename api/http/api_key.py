"""An API key, as a line of a key file or of the store describes it.

A line has the key itself, or the SHA-256 of one as ``sha256:HEX``, and then words that begin with ``name=``, ``team=``,
``limits=``, ``tools=``, ``models=``, ``webhook=``, ``record=`` or ``expires=``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from hashlib import sha256
from time import time
from typing import Any

import msgspec

from penstock.services.model_names import wrong_name
from penstock.services.standard_webhooks import checked_url
from penstock.stages.normalize.tool_types import named

HASHED = "sha256:"
"""The start of a line that has the digest of a key in place of the key."""

LEAST_LENGTH = 16
"""The fewest characters of a key.  A shorter one could be guessed, at the latest from its digest in the store."""


class ApiKey(msgspec.Struct, frozen=True):
    """A key of a client: the hexadecimal ``digest`` is the owner of what the client stores."""

    digest: str
    words: str = ""
    """The words of the line."""
    name: str = ""
    team: str = ""
    """The team that the client is of, for the accounts."""
    limits: str = ""
    """The name of the table of limits that holds for this key; empty for the default."""
    tools: frozenset[str] | None = None
    """The tools that the client may use, built-in and of the operator's own; None for those of all clients."""
    models: frozenset[str] | None = None
    """The models that the client may use, by names or patterns of names; None for all."""
    webhook: str = ""
    """The URL that gets the webhooks of this key; empty for that of the server."""
    expires: float | None = None
    """The time from which the key is refused; None for never."""
    record: bool = True
    """False if responses of the client are never recorded."""

    @property
    def is_expired(self) -> bool:
        """True if the key was valid once, and is refused now."""
        return self.expires is not None and time() >= self.expires

    @property
    def title(self) -> str:
        """A short name for people."""
        return self.name or self.digest[:8]


def digest_of(key: str) -> str:
    """Return the SHA-256 of a key in hex."""
    return sha256(key.encode(errors="surrogateescape")).hexdigest()


def plain_key(text: str) -> str:
    """Return a key as it is; raise `ValueError` if it could be guessed, or cannot be sent in a header."""
    if len(text) < LEAST_LENGTH:
        raise ValueError(f"has fewer than {LEAST_LENGTH} characters")
    if not re.fullmatch("[!-~]+", text):
        raise ValueError("is not one word of visible ASCII characters")
    return text


def key_of(line: str, own: Collection[str] | None = ()) -> ApiKey:
    """Return the key of a line; raise `ValueError` for a wrong line, without showing the key in the message.

    ``own`` are the labels of the operator's own tools, or None if they are not known.
    """
    key, *words = line.split()
    return ApiKey(_digest(key), " ".join(words), **_fields(words, own))


def _digest(key: str) -> str:
    if key.startswith(HASHED):
        digest = key.removeprefix(HASHED).lower()
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"has no 64 hexadecimal digits after {HASHED}")
        return digest
    return digest_of(plain_key(key))


def _fields(words: list[str], own: Collection[str] | None) -> dict[str, Any]:
    read, fields = _readers(own), dict[str, Any]()
    for word in words:
        field, separator, value = word.partition("=")
        if not separator or field not in read:
            raise ValueError(f"is not one word, or has a word after it that is none of {', '.join(read)}")
        if field in fields:
            raise ValueError(f"has {field}= twice")
        try:
            fields[field] = read[field](value)
        except ValueError as error:
            raise ValueError(f"has an invalid {field}=: {error}") from None
    return fields


def _name(value: str) -> str:
    if not re.fullmatch(r"[\w.@+-]{1,64}", value, re.ASCII):
        raise ValueError("expected up to 64 letters, digits, and characters of . _ @ + -")
    return value


def _models(value: str) -> frozenset[str]:
    names = value.split(",")
    for name in names:
        if reason := wrong_name(name):
            raise ValueError(reason)
    return frozenset(names)


def _time(value: str) -> float:
    """Return a time of ISO 8601 in seconds; a date is its first moment, and without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        expected = "expected a date such as 2027-01-31; penstock keys make takes a time from now on, such as 90d"
        raise ValueError(expected) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _choice(value: str) -> bool:
    if value not in ("yes", "no"):
        raise ValueError("expected yes or no")
    return value == "yes"


def _readers(own: Collection[str] | None) -> dict[str, Callable[[str], Any]]:
    """Return the function that reads the value of each word."""
    return {
        "name": _name,
        "team": _name,
        "limits": _name,
        "tools": lambda value: named(value.split(","), own),
        "models": _models,
        "webhook": checked_url,
        "record": _choice,
        "expires": _time,
    }
