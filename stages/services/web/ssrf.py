"""Which addresses may be connected to for a URL that came from outside: public ones, and those the operator allows.

Public ones of this machine are not among them.

An address is judged, never a name or a URL, and it has to be the very one that is then connected: a name may resolve
to something else a moment later.  Python's own notion of a global address is of its release date, so what it misses is
listed here.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

_NOT_PUBLIC = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8",
        "100.64.0.0/10",
        "168.63.129.16",  # where Azure tells its machines their secrets
        "192.0.0.0/24",
        "192.88.99.0/24",
        "198.18.0.0/15",
        "240.0.0.0/4",
        "::/96",
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/23",
        "2001:db8::/32",
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",
        "fec0::/10",
    )
)
_EMBEDDING = ((IPv6Network("::ffff:0:0/96"), 0), (IPv6Network("64:ff9b::/96"), 0), (IPv6Network("2002::/16"), 80))
"""Networks whose addresses stand for an IPv4 address, and how far from the right it is: mapped, NAT64, 6to4."""
_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")


class Blocked(OSError):
    """An address that is not connected to; an OSError, as clients go on to the next address of a host at one."""


@dataclass(frozen=True)
class AllowedNetworks:
    """What the operator allows beyond public addresses.

    A host that is allowed by its name may have any address: whoever may set that name is trusted.
    """

    networks: tuple[Network, ...] = ()
    hosts: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> AllowedNetworks:
        """Read networks (``10.0.0.0/8``), addresses and host names; raises ValueError at anything else."""
        networks, hosts = [], set()
        for entry in entries:
            host = _plain(entry)
            if _HOST.fullmatch(host) and not _is_numeric(host):
                hosts.add(host)
            else:
                networks.append(_network(entry))
        return cls(tuple(networks), frozenset(hosts))

    def names(self, host: str) -> bool:
        """Whether a host is allowed by its name."""
        return _plain(host) in self.hosts

    def holds(self, address: Address) -> bool:
        """Whether an address is in one of the networks."""
        return any(address in network for network in self.networks)


NOTHING_ALLOWED = AllowedNetworks()


def check_address(text: str, allowed: AllowedNetworks = NOTHING_ALLOWED) -> None:
    """Raise `Blocked` unless the address may be connected to; ``text`` is one as sockets have it, scope included."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        raise Blocked(f"{text!r} is not an address") from None
    meant = _embedded(address)
    if allowed.holds(address) or allowed.holds(meant):
        return
    if not _is_public(meant):
        raise Blocked(f"address {address} is not public")
    if _is_own(meant):
        raise Blocked(f"address {address} is this machine's own")


def _is_public(address: Address) -> bool:
    special = address.is_multicast or address.is_reserved or address.is_loopback or address.is_link_local
    return address.is_global and not special and not any(address in network for network in _NOT_PUBLIC)


def _is_own(address: Address) -> bool:
    """Whether this machine has it: from within, no firewall is in the way.  Nothing is sent to find out."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sender:
        sender.connect((str(address), 9))
        return ip_address(str(sender.getsockname()[0]).partition("%")[0]) == address
    return False


def _embedded(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, or else the address itself."""
    for network, shift in _EMBEDDING:
        if address in network:
            return IPv4Address((int(address) >> shift) & 0xFFFFFFFF)
    return address


def _network(entry: str) -> Network:
    try:
        return ip_network(entry.strip().removeprefix("[").removesuffix("]"))
    except ValueError as error:
        raise ValueError(f"{entry!r} is neither a network, nor an address, nor a host name: {error}") from None


def _is_numeric(host: str) -> bool:
    """Whether it is an address or means one: no name ends in a number."""
    return re.fullmatch(r"\d+|0x[0-9a-f]*", host.rpartition(".")[2]) is not None


def _plain(host: str) -> str:
    return host.strip().rstrip(".").lower()
