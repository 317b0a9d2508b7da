"""Authentication: the API keys of this server, with the owner that each stands for.

Only the SHA-256 digest of a key is kept.  It is also the name of the owner in the store, so that neither memory nor
the database reveals a key.  A server without keys has a single owner, whose name is empty.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from hmac import compare_digest
from pathlib import Path
from typing import Any, Protocol, TypeVar

from aiohttp import hdrs, web
from msgspec.structs import replace

from penstock.api.http.api_key import HASHED, LEAST_LENGTH, ApiKey, digest_of, key_of
from penstock.api.http.conventions import conventions_of
from penstock.api.http.key_sources import api_keys
from penstock.api.http.prefix import path_of
from penstock.pipeline.errors import StoreFailed, Unauthorized
from penstock.pipeline.logs import counted
from penstock.services.store.stored_keys import StoredKeys

AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

OWNER: web.RequestKey[str] = web.RequestKey("owner", str)
"""The owner of a request: the SHA-256 of its key in hex, or empty if no key is needed.

Only the owner of a response finds it.  An application around this one may set any other text.
"""

REFUSED_KEY: web.RequestKey[str] = web.RequestKey("refused key", str)
"""The name of the key that a request was refused for: that of an expired one, or else the start of its digest."""

OPEN = frozenset({"/", "/health", "/live", "/load", "/openapi.json", "/ping", "/ready", "/usage", "/version"})
"""The paths that need no key."""

OPERATORS = frozenset({"/metrics"})
"""The paths that are not for clients, and check a key of their own."""


_FOR_OPERATORS = "for_operators"


def for_operators(handler: AnyHandler) -> AnyHandler:
    """Let a handler answer the key of the operator alone, and no API key of a client."""
    handler.__dict__[_FOR_OPERATORS] = True
    return handler


def is_open(request: web.Request) -> bool:
    """True if a request needs no key."""
    return path_of(request) in OPEN


class SignIn(Protocol):
    """A way to sign in beside API keys, of an extension."""

    async def key_of(self, token: str) -> ApiKey | None:
        """Return the key that a token stands for; None if the token is none of its kind.

        Raises `Unauthorized` for a token of its kind that is refused.
        """
        ...

    def known(self, owner: str) -> ApiKey | None:
        """Return the key of an owner that has signed in; None if it is not known, or no longer."""
        ...


class Keys:
    """The API keys of this server: those of ``file`` and ``given`` ones, and those of its store if it reads them.

    Without any of these sources the server is open to all clients.  ``own_tools`` are the labels of the operator's own
    tools; other servers of a store may have others.  ``operator`` is the key of the routes `for_operators`.
    ``obstacle`` returns why this server cannot serve a key; `take` refuses a key of the store that has one.
    """

    def __init__(
        self,
        file: Path | None = None,
        given: str | Sequence[str] | None = None,
        own_tools: Collection[str] = (),
        *,
        reads_store: bool = False,
        operator: str = "",
        obstacle: Callable[[ApiKey], str] = lambda _: "",
    ) -> None:
        self.are_needed = file is not None or given is not None or reads_store
        """True if a request needs a key, or a way to sign in."""
        self._file, self._given, self._own_tools, self._reads_store = file, given, own_tools, reads_store
        self._operator = digest_of(operator) if operator else ""
        self.obstacle = obstacle
        self.sign_in: SignIn | None = None
        """The way to sign in beside the keys, if there is one; a request then needs one of both."""
        self.remembered: Callable[[str], str | None] = lambda _: None
        """Returns the words of an owner that signed in once: they hold for what goes on, and open nothing."""
        self._rows: tuple[tuple[str, str], ...] = ()
        self.refused: frozenset[str] = frozenset()
        """The keys of the store that this server refuses, each with the reason."""
        self._shared: frozenset[str] = frozenset()
        self.take(api_keys(file, given, own_tools))

    def read(self) -> Collection[ApiKey]:
        """Read the keys of the settings again, for `take`; raises `UnusableKeys`.

        Unlike at the start, a file may have no key by now: the last one may have been revoked.
        """
        return tuple(api_keys(self._file, self._given, self._own_tools, may_be_none=True))

    def take(self, keys: Iterable[ApiKey]) -> None:
        """Know these keys of the settings, and those of the store that this server can serve now."""
        self.own: Collection[ApiKey] = tuple(keys)
        stored, refused = list[ApiKey](), set[str]()
        for digest, words in self._rows:
            try:
                key = key_of(f"{HASHED}{digest} {words}", own=None)
            except ValueError as error:
                refused.add(f"{digest[:8]} of the store {error}")
                continue
            if reason := self.obstacle(key):
                refused.add(f"{key.title} of the store is refused: it has {reason}")
            else:
                stored.append(key)
        for each in sorted(refused - self.refused):
            logger.error("The key %s", each)
        self.refused = frozenset(refused)
        self._known = {key.digest: key for key in (*stored, *self.own)}
        shared = frozenset(_shared_names(self._known.values()))
        for each in sorted(shared - self._shared):
            logger.warning("Several API keys have the %s: the log and the metrics do not tell them apart", each)
        self._shared = shared

    async def read_store(self, stored: StoredKeys) -> None:
        """Read the keys of the store, again, if this server reads them.

        Raises `StoreFailed` if the store cannot be read, and then the known keys stay.  A row that this release does
        not understand, or cannot serve, is logged once, and is no key: it keeps no server from starting.
        """
        if self._reads_store and (rows := await stored.all()) != self._rows:
            self._rows = rows
            self.take(self.own)

    async def follow_store(self, stored: StoredKeys, seconds: float) -> None:
        """Read the keys of the store every so many ``seconds``, until cancelled."""
        while self._reads_store:
            await asyncio.sleep(seconds)
            with suppress(StoreFailed):  # it is counted and logged where it happens
                await self.read_store(stored)

    @property
    def count(self) -> str:
        """The number of valid keys, for people."""
        return counted(sum(not key.is_expired for key in self._known.values()), "API key")

    @property
    def all(self) -> Collection[ApiKey]:
        """The keys of the settings and of the store."""
        return self._known.values()

    def of(self, owner: str) -> ApiKey | None:
        """Return the key of an owner; None if the owner has none, or no longer."""
        if not owner:
            return None
        if key := self._known.get(owner) or (self.sign_in.known(owner) if self.sign_in else None):
            return key
        words = self.remembered(owner)
        return None if words is None else replace(key_of(f"{HASHED}{owner} {words}", own=None), expires=0.0)

    def tools(self, owner: str) -> frozenset[str] | None:
        """Return the tools that an owner may use; None for those of all clients."""
        return key.tools if (key := self.of(owner)) else None

    def models(self, owner: str) -> frozenset[str] | None:
        """Return the models that an owner may use, by names or patterns of names; None for all."""
        return key.models if (key := self.of(owner)) else None

    def limits(self, owner: str) -> str:
        """Return the name of the limits of an owner; empty for those of all keys without a name for theirs."""
        return key.limits if (key := self.of(owner)) else ""

    @property
    def webhooks(self) -> frozenset[str]:
        """The URLs of the keys that have receivers of webhooks of their own."""
        return frozenset(key.webhook for key in self.all if key.webhook)

    def webhook(self, owner: str) -> str:
        """Return the URL of an owner for webhooks; empty if it has none of its own."""
        return key.webhook if (key := self.of(owner)) else ""

    def may_record(self, owner: str) -> bool:
        """True if responses of an owner may be recorded; those of a key that is not known, or no longer, may not."""
        if not self.are_needed or owner == self._operator:
            return True
        key = self.of(owner)
        return key is not None and key.record

    def title(self, owner: str) -> str:
        """Return the name of an owner's key for people: its ``name=``, or the first digits of its digest."""
        return key.title if (key := self.of(owner)) else owner[:8]

    def team(self, owner: str) -> str:
        """Return the team of an owner; empty if it has none."""
        return key.team if (key := self.of(owner)) else ""

    async def authenticate(self, request: web.Request) -> None:
        """Set the `OWNER` of a request; raise `Unauthorized` if its key is missing, unknown or expired.

        A middleware of an application around this one may have set it already.
        """
        if OWNER not in request:
            try:
                request[OWNER] = await self._owner_of(request)
            except Unauthorized:
                keys = filter(None, map(_bearer, authorizations(request)))
                request[REFUSED_KEY] = self._refused(next(keys, ""))
                raise
            request[KEYS] = self

    def _refused(self, key: str) -> str:
        """Return the name of a refused key for people; empty for a text that cannot be a key, which may be guessed."""
        return self.title(digest_of(key)) if len(key) >= LEAST_LENGTH else ""

    async def _owner_of(self, request: web.Request) -> str:
        if path_of(request) in OPEN | OPERATORS:
            return ""
        if getattr(request.match_info.handler, _FOR_OPERATORS, False):
            return self.operator(*authorizations(request))
        given = tuple(authorizations(request))
        try:
            return self.owner(*given)
        except Unauthorized as error:
            return await self._signed_in(given, error)

    async def _signed_in(self, authorizations: Iterable[str], refusal: Unauthorized) -> str:
        """Return the owner of the first token by which a client signs in, or raise why there is none."""
        for token in filter(None, map(_bearer, authorizations)):
            if self.sign_in is not None and digest_of(token) not in self._known:
                try:
                    if key := await self.sign_in.key_of(token):
                        return key.digest
                except Unauthorized as error:
                    refusal = error
        raise refusal

    @property
    def have_operator(self) -> bool:
        """True if one of them is the operator's."""
        return bool(self._operator)

    def operator(self, *authorizations: str) -> str:
        """Return the operator as an owner, for ``Authorization`` headers; raise `Unauthorized` if none has its key."""
        if not self._operator or not any_opens(authorizations, self._operator):
            raise Unauthorized(variable="PENSTOCK_OPERATOR_KEY", is_set=bool(self._operator))
        return self._operator

    def owner(self, *authorizations: str) -> str:
        """Return the owner for ``Authorization`` headers: that of the first valid key.

        Raises `Unauthorized` if no key is valid.
        """
        if not self.are_needed:
            return ""
        owners = [digest_of(key) for key in map(_bearer, authorizations) if key]
        for owner in owners:
            if owner in self._known and self._is_valid(owner):  # no key is that of an owner who signs in by a token
                return owner
        raise Unauthorized(has_key=bool(owners))

    def check(self, owner: str) -> None:
        """Raise `Unauthorized` if the key of an owner is unknown, or expired or revoked by now."""
        if self.are_needed and not self._is_valid(owner):
            raise Unauthorized(has_key=True)

    def may_go_on(self, owner: str) -> bool:
        """True if what an owner has left may go on: its key is valid, or it has signed in, be the token over by now."""
        if not self.are_needed:
            return True
        key = self._known.get(owner)
        return not key.is_expired if key else self.sign_in is not None and self.of(owner) is not None

    def _is_valid(self, owner: str) -> bool:
        key = self.of(owner)  # the time that this takes reveals at most a digest
        return key is not None and not key.is_expired


def _shared_names(keys: Iterable[ApiKey]) -> Iterator[str]:
    """Yield each name that several valid keys have, with the starts of their digests."""
    by_name = defaultdict[str, list[str]](list)
    for key in keys:
        if key.name and not key.is_expired:
            by_name[key.name].append(key.digest[:8])
    for name, digests in by_name.items():
        if len(digests) > 1:
            yield f"name {name} ({', '.join(sorted(digests))})"


def _bearer(authorization: str) -> str:
    """Return the key in an ``Authorization`` header; empty if it has none."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def any_opens(authorizations: Iterable[str], digest: str) -> bool:
    """True if one of several ``Authorization`` headers has the key with a digest."""
    sent = [digest_of(_bearer(each)) for each in authorizations]
    return sum(compare_digest(each, digest) for each in sent) > 0  # of digests: no secret length


def authorizations(request: web.Request) -> Iterator[str]:
    """Yield each ``Authorization`` of a request, or what it would be if another header has the key.

    Clients send a right key in one header beside an old key in another one, so all of them count.
    """
    for name in conventions_of(request).key_headers:
        if given := request.headers.get(name):
            yield given if name == hdrs.AUTHORIZATION else f"Bearer {given}"


KEYS: web.RequestKey[Keys] = web.RequestKey("keys", Keys)
"""The keys by which the owner of a request was found."""


def title_of(request: web.Request) -> str:
    """Return the name of a request's key for people; empty if it has none."""
    owner: str = request.get(OWNER) or ""
    keys = request.get(KEYS)
    return keys.title(owner) if keys and owner else owner[:8]


def team_of(request: web.Request) -> str:
    """Return the team of a request's key; empty if it has none."""
    keys = request.get(KEYS)
    return keys.team(request[OWNER]) if keys else ""


def check_key(request: web.Request) -> None:
    """Raise `Unauthorized` if the key of an open connection is expired or revoked by now."""
    if keys := request.get(KEYS):
        keys.check(request[OWNER])
