"""The text of a bearer token (JWT), read strictly before anything of it is trusted.

Nothing here checks a signature: what is read decides only which issuer has to have signed it, and what is refused at
once.  The names are those of RFC 7515 and RFC 7519.
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

import msgspec

from penstock.pipeline.errors import InvalidToken

LONGEST_TOKEN = 8192
"""Bytes of a token: a longer one is refused before any of it is decoded."""

LONGEST_KID = 256
"""Characters of the id of a key in a token."""

_SIGNED = re.compile(r"e[w-z0-9_-][\w-]*\.[\w-]*\.[\w-]*", re.ASCII)
"""The form of a signed token (JWS): three parts in base64url without padding, the first of which begins with ``{``."""

_ENCRYPTED = re.compile(r"e[w-z0-9_-][\w-]*(\.[\w-]*){4}", re.ASCII)
"""The form of an encrypted one (JWE)."""

_CHANGING = ("crit", "b64")
"""The parameters of a header that change how a token is read; others that are unknown are ignored (RFC 7515)."""

Number: TypeAlias = int | float

Claims: TypeAlias = Mapping[str, Any]


class Header(msgspec.Struct, frozen=True):
    """The header of a token."""

    alg: str
    kid: str | None = None
    typ: str | None = None


class _Registered(msgspec.Struct, frozen=True):
    """The claims that each token needs, or whose types are known."""

    iss: str
    exp: Number
    aud: str | list[str]
    iat: Number | None = None
    nbf: Number | None = None


def is_token(text: str) -> bool:
    """Return True for a text of the form of a token, signed or encrypted; any other may be an API key."""
    if len(text) > LONGEST_TOKEN:
        text = text[:LONGEST_TOKEN]
        return text.startswith("ey") and "." in text
    return bool(_SIGNED.fullmatch(text) or _ENCRYPTED.fullmatch(text))


def read_token(text: str) -> tuple[Header, Claims]:
    """Return the header and the claims of a token, of which nothing is verified; raises `InvalidToken`."""
    if len(text) > LONGEST_TOKEN:
        raise InvalidToken(f"has more than {LONGEST_TOKEN} bytes")
    if _ENCRYPTED.fullmatch(text):
        raise InvalidToken("is encrypted, and this server takes signed ones only")
    first, second, _ = text.split(".")
    header, claims = _object(first, "header"), _object(second, "claims")
    if changing := [name for name in _CHANGING if name in header]:
        raise InvalidToken(f"has the header {changing[0]}, which this server does not take")
    if "cnf" in claims:
        raise InvalidToken("is bound to a key of its client (cnf), so that it is no bearer token")
    try:
        msgspec.convert(claims, _Registered)
        read = msgspec.convert(header, Header)
    except msgspec.ValidationError:
        raise InvalidToken("lacks one of alg, iss, exp and aud, or has one of a wrong type") from None
    if len(read.kid or "") > LONGEST_KID:
        raise InvalidToken(f"names a key by more than {LONGEST_KID} characters")
    return read, claims


def _object(part: str, name: str) -> dict[str, Any]:
    """Return the JSON object of one part; refuse one that readers understand differently, such as double names."""
    try:
        value = json.loads(
            urlsafe_b64decode(part + "=" * (-len(part) % 4)),
            object_pairs_hook=_distinct,
            parse_constant=_no_constant,
        )
    except (ValueError, RecursionError):
        raise InvalidToken(f"has {name} that cannot be read") from None
    if not isinstance(value, dict):
        raise InvalidToken(f"has {name} that are no JSON object")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
