"""Signing in: a bearer token is verified once, and stands for a key until it expires.

A verified token is remembered by its digest.  Its text is kept nowhere, and the errors of the library that verifies it
reach no client and no log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

import jwt
from aiohttp import ClientSession
from cachetools import TLRUCache
from msgspec.structs import replace

from penstock.api.http.api_key import ApiKey
from penstock.api.http.auth import Keys
from penstock.extensions.sign_in.claims import grant_words, signed_key
from penstock.extensions.sign_in.discovery import IssuerKeys
from penstock.extensions.sign_in.issuers import Grant, Issuer, check_grants, read_issuers
from penstock.extensions.sign_in.key_sets import PublicKey
from penstock.extensions.sign_in.token_text import Header, is_token, read_token
from penstock.pipeline.errors import InvalidToken
from penstock.stages.normalize.tool_types import named

MOST_TOKENS = 10_000
"""Verified tokens that are remembered; the oldest is verified again."""

MOST_OWNERS = 10_000
"""Owners that are known by a token of theirs."""

LATEST = 2.0**40
"""The latest expiry of a token, in seconds since 1970: a later time is no time."""

_TYPES = {"jwt", "at+jwt", "application/jwt", "application/at+jwt"}
"""The types of tokens that sign a client in, in small letters; others, such as those of a logout, do not."""

_Expiring = TLRUCache[str, ApiKey]


def read_sign_in(file: Path, own_tools: Collection[str]) -> Mapping[str, Issuer]:
    """Return the issuers of a file; raises `UnusableSignIn`, also for tools that there are not."""

    def check(grant: Grant) -> None:
        tuple(grant_words(grant))
        named(grant.tools or (), own_tools)

    issuers = read_issuers(file)
    check_grants(file, issuers, check)
    return issuers


@dataclass(frozen=True)
class _Trusted:
    """An issuer of the file, its keys, and the tokens that were verified with these."""

    url: str
    issuer: Issuer
    keys: IssuerKeys
    tokens: _Expiring


def _expiring(most: int) -> _Expiring:
    return TLRUCache(most, ttu=lambda _, key, now: now if key.expires is None else key.expires, timer=time.time)


@dataclass(eq=False)
class IssuedTokens:
    """The tokens of issuers, which sign clients in.

    The ``keys`` say why this server cannot serve a key, and ``remember`` keeps the words of an owner for what the owner
    leaves running.
    """

    session: ClientSession
    keys: Keys
    own_tools: Collection[str] = ()
    remember: Callable[[str, str], None] = lambda _, __: None
    _trusted: dict[str, _Trusted] = field(default_factory=dict)
    _owners: _Expiring = field(default_factory=partial(_expiring, MOST_OWNERS))

    @property
    def issuers(self) -> Mapping[str, Issuer]:
        """The issuers that are trusted, by their URLs."""
        return {url: trusted.issuer for url, trusted in self._trusted.items()}

    async def take(self, issuers: Mapping[str, Issuer]) -> None:
        """Trust these issuers from now on; all tokens are verified again."""
        before, self._trusted = self._trusted, {}
        for url, issuer in issuers.items():
            tokens, known = _expiring(MOST_TOKENS), before.get(url)
            if known and known.issuer.jwks == issuer.jwks:
                keys = known.keys
            else:
                keys = IssuerKeys(url, issuer.jwks, self.session)
                keys.begin_fetch()
            keys.changed = tokens.clear
            self._trusted[url] = _Trusted(url, issuer, keys, tokens)
        self._owners.clear()
        kept = [trusted.keys for trusted in self._trusted.values()]
        for trusted in before.values():
            if trusted.keys not in kept:
                await trusted.keys.close()

    async def close(self) -> None:
        """End all fetches."""
        for trusted in self._trusted.values():
            await trusted.keys.close()

    def known(self, owner: str) -> ApiKey | None:
        """Return the key that the latest token of an owner stands for, until it expires."""
        return self._owners.get(owner)

    async def key_of(self, token: str) -> ApiKey | None:
        """Return the key that a token stands for; None if the text is no token.

        Raises `InvalidToken`, or `IssuerUnavailable` if it cannot be verified now.
        """
        if not is_token(token):
            return None
        digest = sha256(token.encode(errors="surrogateescape")).hexdigest()
        for trusted in self._trusted.values():
            if key := trusted.tokens.get(digest):
                trusted.keys.follow()
                break
        else:
            key = await self._verified(token, digest)
        if reason := self.keys.obstacle(key):
            raise InvalidToken(f"gives what this server cannot serve: {reason}")
        self._owners[key.digest] = key
        self.remember(key.digest, key.words)
        return key

    async def _verified(self, token: str, digest: str) -> ApiKey:
        header, claims = read_token(token)
        trusted = self._trusted.get(claims["iss"])
        if trusted is None:
            raise InvalidToken("is of an issuer that this server does not know")
        issuer = trusted.issuer
        _check_type(header, issuer)
        if header.alg not in issuer.algorithms:
            raise InvalidToken("is signed in a way that this server does not take")
        key = await trusted.keys.find(header.kid, header.alg)
        _verify(token, key, header.alg, trusted)
        signed = signed_key(trusted.url, issuer, claims, self.own_tools)
        signed = replace(signed, expires=min(claims["exp"], LATEST) + issuer.skew)
        trusted.tokens[digest] = signed
        return signed


def _check_type(header: Header, issuer: Issuer) -> None:
    kind = (header.typ or "jwt").lower()
    if kind not in _TYPES or (issuer.type and kind.removeprefix("application/") != issuer.type):
        raise InvalidToken("is of a type that does not sign a client in")


def _verify(token: str, key: PublicKey, algorithm: str, trusted: _Trusted) -> None:
    """Verify the signature, the times, the issuer and the audience; raise `InvalidToken` in words of this server."""
    try:
        jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            audience=trusted.issuer.audience,
            issuer=trusted.url,
            leeway=trusted.issuer.skew,
            options={"require": ["exp", "iss", "aud"], "verify_sub": False, "verify_jti": False},
        )
    except jwt.ExpiredSignatureError:
        raise InvalidToken("has expired", code="token_expired") from None
    except jwt.ImmatureSignatureError:
        raise InvalidToken("is not valid yet") from None
    except jwt.InvalidAudienceError:
        raise InvalidToken("is for another audience") from None
    except (jwt.PyJWTError, TypeError, ValueError, OverflowError):
        raise InvalidToken("has a signature or a claim that is wrong") from None
