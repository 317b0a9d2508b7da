"""The proxies before this server, whose headers name the client of a request, and how it called this server.

Any client can send these headers, so they count only in a request of a proxy that the operator trusts.  Each proxy
appends the address that called it.  The client is therefore the last address that is no trusted proxy: what stands
before it, the client may have written itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple, TypeAlias

from aiohttp import web
from multidict import CIMultiDictProxy

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

FORWARDED = "Forwarded"
"""The header of RFC 7239, whose elements name an address as ``for=`` and a host as ``host=``."""

X_FORWARDED_FOR = "X-Forwarded-For"

MOST_HOPS = 32
"""The most proxies between a client and this server."""

_PREFIX = re.compile(r"(/[\w.~!$&'()*+;=:@%-]{1,100}){1,10}", re.ASCII)


class AsSent(NamedTuple):
    """A request as its client sent it to the outermost proxy."""

    address: str | None
    """The address of the client; that of the proxy if it names none, and None if the client has left already."""
    host: str = ""
    """The host and port that the client named; empty if only the header ``Host`` names them."""
    prefix: str = ""
    """The start of the path that the proxies have removed."""
    is_proxied: bool = False


AS_SENT: web.RequestKey[AsSent] = web.RequestKey("as_sent", AsSent)


@dataclass(frozen=True)
class Proxies:
    """The proxies that are trusted, and the header in which they name the client."""

    trusted: tuple[Network, ...] = ()
    header: str = X_FORWARDED_FOR

    @classmethod
    def parse(cls, networks: Iterable[str], header: str = X_FORWARDED_FOR) -> Proxies:
        """Parse addresses and networks (``10.0.0.0/8``); raises `ValueError` for anything else."""
        return cls(tuple(ip_network(network) for network in networks), header)

    def trusts(self, address: Address | None) -> bool:
        """Return True for the address of a trusted proxy."""
        return address is not None and any(address in network for network in self.trusted)

    def as_sent(self, peer: str | None, headers: CIMultiDictProxy[str]) -> AsSent:
        """Return what the headers say, if ``peer`` is trusted; no header makes this fail."""
        address = parsed_address(peer or "")
        if not self.trusts(address):
            return AsSent(peer)
        last: Mapping[str, str] = {}
        for hop in self._hops(headers):
            if (named := parsed_address(hop.get("for", ""))) is None:
                break
            address, last = named, hop
            if not self.trusts(address):
                break
        prefix = _last(headers, "X-Forwarded-Prefix").rstrip("/")
        return AsSent(
            str(address),
            last.get("host", "") if self.header == FORWARDED else _last(headers, "X-Forwarded-Host"),
            prefix if _PREFIX.fullmatch(prefix) else "",
            is_proxied=True,
        )

    def _hops(self, headers: CIMultiDictProxy[str]) -> Iterator[Mapping[str, str]]:
        """Yield what each proxy says about its caller, the nearest proxy first.

        No address holds a comma, so a quotation mark that the client left open cannot hide a later element.
        """
        elements = ",".join(headers.getall(self.header, ())).rsplit(",", MOST_HOPS)
        for element in reversed(elements[-MOST_HOPS:]):
            if self.header == FORWARDED:
                pairs = (pair.partition("=") for pair in element.split(";"))
                yield {name.strip().lower(): value.strip().strip('"') for name, _, value in pairs}
            else:
                yield {"for": element}


PROXIES: web.AppKey[Proxies] = web.AppKey("proxies", Proxies)


def _last(headers: CIMultiDictProxy[str], name: str) -> str:
    """Return the last value of a header: the one of the nearest proxy, if others have sent one, too."""
    return ",".join(headers.getall(name, ())).rpartition(",")[2].strip()


@lru_cache
def parsed_address(text: str) -> Address | None:
    """Parse an address, in brackets or not, with a port and an IPv6 zone or without; None for anything else."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    with suppress(ValueError):
        address = ip_address(text.partition("%")[0])
        return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address
    return None


def client_of(address: Address | None) -> str:
    """Return the address of a client, or its /64 subnet with IPv6, all addresses of which one client may have."""
    if isinstance(address, IPv6Address):
        return f"{IPv6Address(int(address) >> 64 << 64)}/64"
    return str(address or "")
