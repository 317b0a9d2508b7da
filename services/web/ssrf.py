"""Protection against server-side request forgery: the addresses that a URL from untrusted input may lead to.

These are public addresses, except this machine's own, and addresses that the operator allows.

The check is on an address, never on a name or a URL, and has to be on the very address that is then connected: a name
may resolve to something else a moment later.  Python's ``is_global`` is only as current as its release, so the networks
that it misses are listed here.
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
        "168.63.129.16",  # Azure serves secrets to its virtual machines here
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
"""Networks of addresses that embed an IPv4 address, with its position in bits: IPv4-mapped, NAT64, 6to4."""
_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")


class Blocked(OSError):
    """The address must not be connected to.  An `OSError`, so that clients try the next address of the host."""


@dataclass(frozen=True)
class AllowedNetworks:
    """The networks and hosts that the operator allows in addition to public addresses.

    A host that is allowed by its name may have any address: the owner of that name is trusted.
    """

    networks: tuple[Network, ...] = ()
    hosts: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> AllowedNetworks:
        """Parse networks (``10.0.0.0/8``), addresses and host names; raises `ValueError` for anything else."""
        networks, hosts = [], set()
        for entry in entries:
            host = _plain(entry)
            if _HOST.fullmatch(host) and not _is_numeric(host):
                hosts.add(host)
            else:
                networks.append(_network(entry))
        return cls(tuple(networks), frozenset(hosts))

    def names(self, host: str) -> bool:
        """True if a host is allowed by its name."""
        return _plain(host) in self.hosts

    def holds(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


NOTHING_ALLOWED = AllowedNetworks()


def check_address(text: str, allowed: AllowedNetworks = NOTHING_ALLOWED) -> None:
    """Raise `Blocked` unless the address may be connected to.

    ``text`` is an address in the form that sockets take; an IPv6 scope (``%eth0``) is ignored.
    """
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
    """True if the address is this machine's own: a connection to it would bypass the firewall.

    Connecting a UDP socket sends nothing, but chooses the source address for a target.  For an address of this machine
    that is the address itself.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sender:  # no route leads there
        sender.connect((str(address), 9))
        return ip_address(str(sender.getsockname()[0]).partition("%")[0]) == address
    return False


def _embedded(address: Address) -> Address:
    """Return the IPv4 address that is embedded in an IPv6 address, or else the address itself."""
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
    """True if ``host`` ends in a number, as no host name does: it is an address in some notation."""
    return re.fullmatch(r"\d+|0x[0-9a-f]*", host.rpartition(".")[2]) is not None


def _plain(host: str) -> str:
    return host.strip().rstrip(".").lower()
