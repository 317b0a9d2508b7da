"""Whose a request is: the API keys of this server, and what belongs to each of them.

Only the SHA-256 of a key is kept.  It is the owner's name in the store too, so that neither memory nor the database
gives a key away.  A server without keys has one owner, who has no name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from aiohttp import web

from penstock.api.http.errors import Handler
from penstock.pipeline.errors import Unauthorized

OWNER: web.RequestKey[str] = web.RequestKey("owner", str)
"""Whose a request is: the SHA-256 of its key in hex, or nothing where the server has no keys."""

OPEN = frozenset({"/health", "/openapi.json"})
"""The paths that need no key."""

LEAST_LENGTH = 16
"""Characters; what is shorter can be guessed, from the store's digests at the latest."""


class UnusableKeys(ValueError):
    """These keys would protect nothing, or could never be sent."""


class Keys:
    """The API keys that open this server; without any it is open to all."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._owners = tuple(dict.fromkeys(map(_digest, keys)))

    @web.middleware
    async def authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Say of a request whose it is, as `OWNER`; raises `Unauthorized`."""
        request[OWNER] = "" if request.path in OPEN else self.owner(request.headers.get("Authorization", ""))
        return await handler(request)

    def owner(self, authorization: str) -> str:
        """Who has the key of this header; raises `Unauthorized`."""
        if not self._owners:
            return ""
        scheme, _, key = authorization.partition(" ")
        sent = _digest(key.strip())
        matches = [compare_digest(sent, owner) for owner in self._owners]  # every one, so that the time tells nothing
        if scheme.lower() != "bearer" or not any(matches):
            raise Unauthorized
        return sent


def load_keys(file: Path | None, given: str | Sequence[str] | None) -> Keys:
    """The keys of a file, one in a line, and those that were ``given``, in a text with commas or white space between.

    Raises `OSError` for a file that cannot be read, and `UnusableKeys` also where there should be keys and are none.
    """
    keys: list[str] = []
    if file is not None:
        keys += _usable(_lines(file), str(file))
    if given is not None:
        keys += _usable(re.findall(r"[^,\s]+", given) if isinstance(given, str) else given, "api_keys")
    return Keys(keys)


def _lines(file: Path) -> Iterator[str]:
    """What is not empty once ``#`` and all behind it are gone."""
    for line in file.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines():
        if key := re.sub(r"(^|\s)#.*", "", line).strip():
            yield key


def _usable(keys: Iterable[str], source: str) -> Iterator[str]:
    """The same keys; what is said of one that cannot be used does not show it."""
    number = 0
    for number, key in enumerate(keys, start=1):
        if len(key) < LEAST_LENGTH:
            raise UnusableKeys(f"{source}: key {number} has fewer than {LEAST_LENGTH} characters")
        if not re.fullmatch("[!-~]+", key):
            raise UnusableKeys(f"{source}: key {number} is not one word of visible ASCII characters")
        yield key
    if not number:
        raise UnusableKeys(f"{source}: there is no API key")


def _digest(key: str) -> str:
    return sha256(key.encode(errors="surrogateescape")).hexdigest()
