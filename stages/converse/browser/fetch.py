"""Fetching pages whose addresses come from outside: guarded where sockets are made, so on every redirect and retry.

A connector is told which address is about to be connected only when it makes the socket; there the address is judged,
whatever name, form of number or redirect led to it.  What a page may take is bounded: bytes, seconds and redirects.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from ipaddress import ip_address

import aiohttp
from aiohappyeyeballs import AddrInfoType
from aiohttp.abc import AbstractResolver
from yarl import URL

from stages.converse.browser.failure import Failure
from stages.guard import NOTHING_ALLOWED, AllowedNetworks, Blocked, check_address

PORTS = (80, 443)
LARGEST_PAGE = 2 << 20
LONGEST_URL = 2_048
_REDIRECTS = 5
_SECONDS = 20.0
_HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; penstock)",
    "Accept": "text/html,application/xhtml+xml,text/*;q=0.9,application/json;q=0.9",
    "Accept-Language": "en;q=0.8,*;q=0.5",
}


@dataclass(frozen=True)
class Fetched:
    """What came from a URL, at the end of all redirects; ``charset`` is what its server named, if anything."""

    url: str
    is_html: bool
    charset: str
    body: bytes


def guarded_connector(allowed: AllowedNetworks, resolver: AbstractResolver | None = None) -> aiohttp.TCPConnector:
    """Connections to public addresses on the usual ports, and to what the operator allows on any."""

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

    return aiohttp.TCPConnector(
        socket_factory=socket_factory, resolver=resolver, use_dns_cache=False, limit=32, limit_per_host=4
    )


def _is_allowed(address: str, allowed: AllowedNetworks) -> bool:
    return allowed.holds(ip_address(address.partition("%")[0]))


class Fetcher:
    """Fetches pages; its connections are made when they are needed."""

    def __init__(self, allowed: AllowedNetworks = NOTHING_ALLOWED, resolver: AbstractResolver | None = None) -> None:
        self._allowed = allowed
        self._resolver = resolver
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def fetch(self, url: str) -> Fetched:
        """The page at a URL; raises `Failure`."""
        try:
            async with asyncio.timeout(_SECONDS):
                return await self._followed(_checked(url))
        except TimeoutError:
            raise Failure("It took too long.") from None
        except aiohttp.ClientConnectorError as error:
            raise Failure(_why(error)) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Failure(f"No answer came that could be read ({type(error).__name__}).") from None

    async def close(self) -> None:
        """Close the connections."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    async def _followed(self, url: URL) -> Fetched:
        for _ in range(_REDIRECTS + 1):
            async with self._session(url).get(url, allow_redirects=False) as answer:
                target = answer.headers.get("Location")
                if answer.status not in (301, 302, 303, 307, 308) or target is None:
                    return await _read(answer)
            url = _checked(str(url.join(URL(target))))
        raise Failure("There are too many redirects.")

    def _session(self, url: URL) -> aiohttp.ClientSession:
        """One for hosts that are allowed by name, whatever their addresses, and one for all others."""
        trusted = self._allowed.names(url.host or "")
        if trusted not in self._sessions:
            connector = (
                aiohttp.TCPConnector(resolver=self._resolver)
                if trusted
                else guarded_connector(self._allowed, self._resolver)
            )
            self._sessions[trusted] = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=_HEADERS,
                timeout=aiohttp.ClientTimeout(total=_SECONDS, sock_connect=5),
            )
        return self._sessions[trusted]


def _checked(text: str) -> URL:
    if len(text) > LONGEST_URL:
        raise Failure("The URL is too long.")
    try:
        url = URL(text)
        is_web = url.scheme in ("http", "https") and bool(url.host) and url.port is not None
    except ValueError:
        raise Failure("This is not a URL.") from None
    if not is_web:
        raise Failure("Only pages at http:// and https:// can be opened.")
    if url.user is not None or url.password is not None:
        raise Failure("A URL with a user or a password is not opened.")
    return url.with_fragment(None)


def _why(error: aiohttp.ClientConnectorError) -> str:
    """Without the addresses: which ones a name has may be nobody's business."""
    if isinstance(error.os_error, Blocked):
        return "Its address is not one that may be opened."
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "There is no such host."
    return "No connection could be made."


async def _read(answer: aiohttp.ClientResponse) -> Fetched:
    if not 200 <= answer.status < 300:
        raise Failure(f"Its server answered with status {answer.status}.")
    kind = answer.content_type if "Content-Type" in answer.headers else ""
    if kind and not _is_text(kind):
        raise Failure(f"It is of type {kind[:100]}, which cannot be read here.")
    body = await _body(answer.content)
    is_html = kind in ("text/html", "application/xhtml+xml") if kind else body.lstrip()[:1] == b"<"
    if not kind and b"\0" in body:
        raise Failure("It is no text.")
    return Fetched(str(answer.url), is_html, answer.charset or "", body)


def _is_text(kind: str) -> bool:
    subtype = kind.partition("/")[2]
    return kind.startswith("text/") or subtype in ("json", "xml", "javascript") or subtype.endswith(("+json", "+xml"))


async def _body(content: aiohttp.StreamReader) -> bytes:
    """As much of it as may be, after decompression."""
    body = bytearray()
    async for chunk in content.iter_chunked(1 << 16):
        body += chunk
        if len(body) >= LARGEST_PAGE:
            break
    return bytes(body[:LARGEST_PAGE])
