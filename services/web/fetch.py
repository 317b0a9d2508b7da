"""Fetching URLs from untrusted input, without access to private networks.

Each address is checked when its socket is made.  Only then is the address to connect to known for certain, whichever
host name, number format or redirect led to it; and every redirect and retry is checked too.  Time and redirects are
limited here.  The size is limited by the caller's ``read`` function.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from ipaddress import ip_address
from typing import TypeVar

import aiohttp
from aiohappyeyeballs import AddrInfoType
from aiohttp.abc import AbstractResolver
from yarl import URL

from penstock.services.web.domains import ALL_DOMAINS, Domains
from penstock.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks, Blocked, check_address

Read = TypeVar("Read")

PORTS = (80, 443)
LONGEST_URL = 4_096
"""Characters of a URL."""
_REDIRECTS = 5
"""Redirects that are followed."""
_SECONDS = 20.0
"""Seconds in which a page must have been fetched."""


class NotFetched(Exception):
    """The URL could not be fetched.  The message is for the client or the model that named the URL."""


def guarded_connector(allowed: AllowedNetworks, resolver: AbstractResolver | None = None) -> aiohttp.TCPConnector:
    """Make a connector that only connects to public addresses on `PORTS`, and to allowed addresses on any port."""

    def socket_factory(info: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, address = info
        if family not in (socket.AF_INET, socket.AF_INET6):
            raise Blocked("no internet address")
        check_address(str(address[0]), allowed)
        if address[1] not in PORTS and not _is_allowed(str(address[0]), allowed):
            raise Blocked(f"port {address[1]} is not that of the web")
        made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        return made

    # no limit: else the wait for a connection of another request would count as time of this host
    return aiohttp.TCPConnector(socket_factory=socket_factory, resolver=resolver, use_dns_cache=False, limit=0)


def _is_allowed(address: str, allowed: AllowedNetworks) -> bool:
    return allowed.holds(ip_address(address.partition("%")[0]))


class Fetcher:
    """Fetches URLs with fixed ``headers``; connections are made on first use."""

    def __init__(
        self,
        headers: Mapping[str, str],
        allowed: AllowedNetworks = NOTHING_ALLOWED,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self._headers = headers
        self._allowed = allowed
        self._resolver = resolver
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def fetch(
        self, url: str, read: Callable[[aiohttp.ClientResponse], Awaitable[Read]], domains: Domains = ALL_DOMAINS
    ) -> Read:
        """Fetch ``url``, following redirects, and return the result of ``read`` for the final response.

        No host is reached that ``domains`` does not permit, and no redirect to one is followed.

        Raises `NotFetched`, also for statuses other than 2xx.
        """
        try:
            async with asyncio.timeout(_SECONDS):
                return await self._followed(_checked(url, domains), read, domains)
        except TimeoutError:
            raise NotFetched("It took too long.") from None
        except aiohttp.ClientConnectorError as error:
            raise NotFetched(_why(error)) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NotFetched(f"No readable answer came ({type(error).__name__}).") from None

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    async def _followed(
        self, url: URL, read: Callable[[aiohttp.ClientResponse], Awaitable[Read]], domains: Domains
    ) -> Read:
        for _ in range(_REDIRECTS + 1):
            async with self._session(url).get(url, allow_redirects=False) as answer:
                target = answer.headers.get("Location")
                if answer.status not in (301, 302, 303, 307, 308) or target is None:
                    if not 200 <= answer.status < 300:
                        raise NotFetched(f"Its server answered with status {answer.status}.")
                    return await read(answer)
            url = _checked(str(url.join(URL(target))), domains)
        raise NotFetched("There are too many redirects.")

    def _session(self, url: URL) -> aiohttp.ClientSession:
        """Return the session for a URL: unguarded for hosts that are allowed by name, guarded for all others."""
        trusted = self._allowed.names(url.host or "")
        if trusted not in self._sessions:
            connector = (
                aiohttp.TCPConnector(resolver=self._resolver, limit=0)
                if trusted
                else guarded_connector(self._allowed, self._resolver)
            )
            self._sessions[trusted] = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=_SECONDS, sock_connect=5),
            )
        return self._sessions[trusted]


def _checked(text: str, domains: Domains) -> URL:
    if len(text) > LONGEST_URL:
        raise NotFetched("The URL is too long.")
    try:
        url = URL(text)
        is_web = url.scheme in ("http", "https") and bool(url.host) and url.port is not None
    except ValueError:
        raise NotFetched("This is not a URL.") from None
    if not is_web:
        raise NotFetched("Only http:// and https:// can be opened.")
    if url.user is not None or url.password is not None:
        raise NotFetched("A URL with a user or a password is not opened.")
    if not domains.permits(str(url)):
        others = f"Only pages of {', '.join(domains.allowed)}" if domains.allowed else "Only pages of other domains"
        raise NotFetched(f"{others} can be opened.")
    return url.with_fragment(None)


def _why(error: aiohttp.ClientConnectorError) -> str:
    """Describe a connection error without addresses, as those of an internal host name are confidential."""
    if isinstance(error.os_error, Blocked):
        return "Its address is not allowed."
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "There is no such host."
    return "No connection could be made."
