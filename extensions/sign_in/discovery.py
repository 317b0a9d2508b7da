"""The keys of an issuer over the network: found by OIDC discovery, kept, and fetched anew when they rotate.

A server of keys is not trusted with more than its keys: what it sends is bounded, redirects are not followed, and no
request waits for it longer than `PATIENCE`.  However many requests need its keys, one fetch runs at a time.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from urllib.parse import urlsplit

import msgspec
from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, hdrs

from penstock.api.http.http_settings import is_loopback
from penstock.extensions.sign_in.key_sets import KeySet, PublicKey, read_key_set
from penstock.pipeline.errors import InvalidToken, IssuerUnavailable
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.logs import counted
from penstock.services.foreign import Unreadable, decoded, read_whole

logger = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds for which requests wait for the keys of an issuer, and in which a fetch must have ended."""

LARGEST_ANSWER = 256 * 2**10
"""Bytes of an answer of an issuer."""

FRESHEST, FRESH, LEAST_FRESH = 60.0, 600.0, 86_400.0
"""Seconds for which keys are not fetched anew: at least, without a ``max-age`` of the issuer, and at most."""

LASTING = 3600.0
"""Seconds for which keys stay in use after that if the issuer does not answer."""

PAUSE = 60.0
"""Seconds between two fetches for an unknown key: a flood of invented ids is no flood of requests."""

RETRY = 10.0
"""Seconds after a failed fetch until the next one."""

WELL_KNOWN = "/.well-known/openid-configuration"
"""The path of the discovery document, after the URL of an issuer."""


def checked_address(url: str) -> str:
    """Return the URL of an issuer or of its keys; raise `ValueError` unless it is https, or http on this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        is_whole = bool(host) and parts.port != 0
    except ValueError:
        raise ValueError("it is no URL") from None
    if not is_whole or parts.username is not None or parts.fragment or not re.fullmatch("[!-~]+", url):
        raise ValueError("it must name a host, without a user, a password or a fragment")
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
        raise ValueError("it must begin with https://; only a loopback address may have http://")
    return url


class _Document(msgspec.Struct, frozen=True):
    """The parts of a discovery document that count here."""

    issuer: str
    jwks_uri: str


class NotFetched(Exception):
    """The keys of an issuer could not be fetched; the message holds no text of its answer."""


@asynccontextmanager
async def opened_session() -> AsyncGenerator[ClientSession, None]:
    """Open the connections to issuers for the length of a block.

    The variables ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` name private authorities, and ``HTTPS_PROXY`` a proxy.
    """
    async with ClientSession(
        connector=TCPConnector(ssl=ssl.create_default_context()),
        timeout=ClientTimeout(total=PATIENCE),
        cookie_jar=DummyCookieJar(),
        headers={hdrs.ACCEPT: "application/json", hdrs.ACCEPT_ENCODING: "identity"},
        auto_decompress=False,
        trust_env=True,
    ) as session:
        yield session


@dataclass(eq=False)
class IssuerKeys:
    """The keys of one ``issuer``, whose set is at ``jwks``, or where its discovery document says."""

    issuer: str
    jwks: str | None
    session: ClientSession
    changed: Callable[[], None] = lambda: None
    """Called when other keys than before hold."""
    known: KeySet | None = None
    _fresh_until: float = -inf
    _asked_at: float = -inf
    _has_failed: bool = False
    _fetching: asyncio.Task[None] | None = field(default=None, repr=False)

    async def find(self, kid: str | None, algorithm: str) -> PublicKey:
        """Return the key of an id that fits an algorithm.

        Raises `InvalidToken` if the issuer has none, and `IssuerUnavailable` if its keys are not known.
        """
        keys = await self._current()
        found = keys.find(kid, algorithm)
        if found is None and time.monotonic() - self._asked_at >= PAUSE:
            self.begin_fetch()
        if found is None and self._fetching is not None:
            await self._wait()
            found = (self.known or keys).find(kid, algorithm)
        if found is None:
            raise InvalidToken("is signed with a key that its issuer does not have, or no longer")
        return found

    def follow(self) -> None:
        """Fetch the keys in the background, unless they are fresh."""
        if time.monotonic() >= self._fresh_until:
            self.begin_fetch()

    def begin_fetch(self) -> None:
        """Fetch the keys in the background, unless that goes on, or failed a moment ago."""
        pause = RETRY if self._has_failed else 0.0
        if self._fetching is None and time.monotonic() - self._asked_at >= pause:
            self._asked_at = time.monotonic()
            self._fetching = asyncio.create_task(self._fetch())

    async def close(self) -> None:
        """End what goes on."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait([self._fetching])

    async def _current(self) -> KeySet:
        """Return keys that are fresh, or stale for less than `LASTING`."""
        self.follow()
        if self.known is None or time.monotonic() >= self._fresh_until + LASTING:
            await self._wait()
        if self.known is None or time.monotonic() >= self._fresh_until + LASTING:
            raise IssuerUnavailable(RETRY)
        return self.known

    async def _wait(self) -> None:
        if self._fetching is not None:
            await asyncio.wait([self._fetching], timeout=PATIENCE)

    async def _fetch(self) -> None:
        """Fetch the keys, or log why they stay as they are."""
        try:
            async with asyncio.timeout(PATIENCE):
                keys, fresh = await self.fetched()
        except NotFetched as error:
            self._has_failed = True
            logger.warning("The keys of %s were not fetched: %s", self.issuer, str(error))
        except (ClientError, OSError, ValueError) as error:  # a timeout is an OSError
            self._has_failed = True
            logger.warning("The keys of %s were not fetched: %s", self.issuer, named_error(error))
        else:
            self._has_failed, self._fresh_until = False, time.monotonic() + fresh
            if keys != self.known:
                self.known = keys
                self.changed()
                logger.info("%s signs with %s", self.issuer, counted(len(keys.keys), "key"))
        finally:
            self._fetching = None

    async def fetched(self) -> tuple[KeySet, float]:
        """Fetch the keys, and the seconds for which they are fresh; raises `NotFetched` or an error of aiohttp."""
        url = self.jwks or await self._discovered()
        async with self.session.get(url, allow_redirects=False) as answer:
            keys = await decoded(await _body(answer, "its keys"), read_key_set)
            fresh = _freshness(answer.headers.get(hdrs.CACHE_CONTROL, ""))
        if not any(key.algorithms for key in keys.keys):
            raise NotFetched(f"none of its {counted(len(keys.keys) + keys.left_out, 'key')} can verify a signature")
        if keys.left_out:
            logger.warning("%s of %s cannot verify signatures", counted(keys.left_out, "key"), self.issuer)
        return keys, fresh

    async def _discovered(self) -> str:
        """Return the URL of the keys, as the issuer itself says."""
        async with self.session.get(self.issuer.rstrip("/") + WELL_KNOWN, allow_redirects=False) as answer:
            body = await _body(answer, "its discovery document")
        document = await decoded(body, lambda data: msgspec.json.decode(data, type=_Document))
        if document.issuer != self.issuer:
            raise NotFetched("its discovery document is that of another issuer")
        try:
            return checked_address(document.jwks_uri)
        except ValueError as error:
            raise NotFetched(f"the URL of its keys is wrong: {error}") from None


async def _body(answer: ClientResponse, name: str) -> bytes:
    if answer.status != 200:
        raise NotFetched(f"{name}: status {answer.status}")
    try:
        return await read_whole(answer.content.iter_any(), LARGEST_ANSWER)
    except Unreadable as error:
        raise NotFetched(f"{name}: {error}") from None


def _freshness(cache_control: str) -> float:
    """Return the seconds for which an answer with this header is fresh, within our bounds."""
    if found := re.search(r"(?:^|[\s,])max-age=(\d{1,9})(?:$|[\s,])", cache_control.lower()):
        return min(max(float(found[1]), FRESHEST), LEAST_FRESH)
    return FRESHEST if re.search("no-store|no-cache", cache_control.lower()) else FRESH
