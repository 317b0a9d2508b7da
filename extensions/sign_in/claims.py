"""The key that the claims of a verified token stand for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from hashlib import sha256
from typing import Any

from penstock.api.http.api_key import HASHED, ApiKey, key_of
from penstock.extensions.sign_in.issuers import Grant, Issuer
from penstock.extensions.sign_in.token_text import Claims
from penstock.pipeline.errors import InvalidToken

LONGEST_SUBJECT = 255
"""Characters of the claim that gives the owner, as OIDC bounds ``sub``."""

LONGEST_NAME = 64
"""Characters of a name for people, as of an API key."""

_SPACED = frozenset({"scope", "scp"})
"""The claims that are texts of words (RFC 8693)."""


def owner_of(issuer: str, subject: str) -> str:
    """Return the owner that a subject of an issuer is: a digest, like that of an API key.

    No header can have the text of which it is the digest, so that it is the digest of no key.
    """
    return sha256(f"{issuer}\0{subject}".encode()).hexdigest()


def signed_key(url: str, issuer: Issuer, claims: Claims, own_tools: Collection[str] | None = None) -> ApiKey:
    """Return the key that verified claims of an issuer stand for, without its expiry; raises `InvalidToken`."""
    subject = _value(claims, issuer.owner)
    if (
        not isinstance(subject, str)
        or not 0 < len(subject) <= LONGEST_SUBJECT
        or re.search("[\0\ud800-\udfff]", subject)
    ):
        raise InvalidToken(f"has no claim {issuer.owner} of 1 to {LONGEST_SUBJECT} characters")
    for claim, needed in issuer.require.items():
        if not set(needed) & set(_values(claims, claim)):
            raise InvalidToken(f"has none of the values of its claim {claim} that this server requires")
    words = " ".join(_words(issuer, claims))
    try:
        return key_of(f"{HASHED}{owner_of(url, subject)} {words}", own_tools)
    except ValueError as error:
        raise InvalidToken(f"has a claim that this server cannot take: its key {error}") from None


def grant_words(grant: Grant) -> Iterator[str]:
    """Yield the words of a key for what the value of a claim gives."""
    if grant.team is not None:
        yield f"team={_word(grant.team)}"
    if grant.limits is not None:
        yield f"limits={_word(grant.limits)}"
    if grant.models is not None:
        yield f"models={_joined(grant.models)}"
    if grant.tools is not None:
        yield f"tools={_joined(grant.tools)}"
    if not grant.record:
        yield "record=no"


def _words(issuer: Issuer, claims: Claims) -> Iterator[str]:
    if name := _name(issuer, claims):
        yield f"name={name}"
    given = list(grant_words(_grant(issuer, claims)))
    yield from given
    named = {word.partition("=")[0] for word in given}
    for field, claim in (("team", issuer.team), ("limits", issuer.limits), ("models", issuer.models)):
        if claim is not None and field not in named:
            values = _values(claims, claim)
            if not values or (field != "models" and len(values) > 1):
                raise InvalidToken(f"has no claim {claim}, or a wrong one, which gives the {field} at this server")
            yield f"{field}={_checked(values, claim)}"


def _name(issuer: Issuer, claims: Claims) -> str:
    """Return the name for people, of the characters that a key may have; empty if it is missing, or is not verified."""
    name = _value(claims, issuer.name)
    if not isinstance(name, str):
        return ""
    return re.sub(r"[^\w.@+-]", "_", name, flags=re.ASCII)[:LONGEST_NAME]


def _grant(issuer: Issuer, claims: Claims) -> Grant:
    """Return what the first value that a token has gives, in the order of the file."""
    for claim, grants in issuer.claims.items():
        has = set(_values(claims, claim))
        for value, grant in grants.items():
            if value in has:
                return grant
    return Grant()


def _checked(values: Sequence[str], claim: str) -> str:
    try:
        return _joined(values)
    except ValueError:
        raise InvalidToken(f"has a claim {claim} whose values are no names") from None


def _joined(values: Sequence[str]) -> str:
    return ",".join(map(_word, values))


def _word(value: str) -> str:
    """Return a value that can stand in a word of a key: a blank or a comma would begin another one."""
    if not value or re.search(r"[\s,=]", value):
        raise ValueError(f"{value!r} is no name")
    return value


def _value(claims: Claims, path: str) -> Any:
    """Return the value of a claim: that of its whole name, or else of the names between the dots of a path.

    It is None for an address that its user has not shown to have.
    """
    if path == "email" and claims.get("email_verified") in (False, "false"):  # some issuers write a text
        return None
    if path in claims:
        return claims[path]
    value: Any = claims
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _values(claims: Claims, path: str) -> list[str]:
    """Return the texts of a claim that is a text, or a list of them."""
    value = _value(claims, path)
    if isinstance(value, str):
        return value.split() if path in _SPACED else [value]
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
