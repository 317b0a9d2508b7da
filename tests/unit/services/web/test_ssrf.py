"""Addresses that a URL from outside may lead to."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from penstock.services.web.ssrf import AllowedNetworks, Blocked, _is_own, check_address

SPECIAL = """
127.0.0.1 127.8.9.1 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 192.0.0.8 192.88.99.1 198.18.0.1
198.51.100.7 203.0.113.9 224.0.0.1 240.0.0.1 255.255.255.255 :: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:10.0.0.1
fe80::1%eth0 fd00::1 fec0::1 ff02::1 64:ff9b::7f00:1 64:ff9b:1::808:808 2002:7f00:1:: 2002:a00:1::1 2001::1
2001:db8::1 3fff::1 5f00::1 100::1 168.63.129.16 ::ffff:168.63.129.16 ::ffff:0:127.0.0.1 4000::1 2001:0:808:808::1
"""
PUBLIC = "8.8.8.8 93.184.216.34 2606:4700::1111 2001:4860:4860::8888 64:ff9b::808:808 2002:808:808::1"


@pytest.mark.parametrize("address", SPECIAL.split())
def test_special_addresses_are_refused(address: str) -> None:
    with pytest.raises(Blocked):
        check_address(address)


@pytest.mark.io
@pytest.mark.parametrize("address", PUBLIC.split())
def test_public_addresses_pass(address: str) -> None:
    """An IPv6 address may stand for one."""
    check_address(address)


@pytest.mark.io
def test_own_addresses_are_known() -> None:
    for own in ("127.0.0.1", "::1"):
        assert _is_own(ip_address(own))
    for foreign in ("8.8.8.8", "2606:4700::1111"):
        assert not _is_own(ip_address(foreign))


def test_malformed_address_is_refused() -> None:
    for text in ("localhost", "2130706433", "127.1", "0177.0.0.1", "/run/socket", ""):
        with pytest.raises(Blocked):
            check_address(text)


def test_allowed_networks_and_addresses_pass() -> None:
    allowed = AllowedNetworks.parse(["10.0.0.0/8", "127.0.0.2", "[::1]", "fd00::/8"])
    for address in ("10.9.8.7", "::ffff:10.9.8.7", "127.0.0.2", "::1", "fd12::1"):
        check_address(address, allowed)
    for address in ("127.0.0.1", "192.168.0.1", "::", "fe80::1"):
        with pytest.raises(Blocked):
            check_address(address, allowed)


def test_hosts_are_allowed_by_name() -> None:
    """Names are distinguished from addresses, and compared as in DNS."""
    allowed = AllowedNetworks.parse(["Tools.internal.", "mcp-1", "10.0.0.1"])
    assert allowed.hosts == {"tools.internal", "mcp-1"}
    assert allowed.names("tools.INTERNAL")
    assert not allowed.names("internal")
    assert not allowed.names("10.0.0.1")


@pytest.mark.parametrize("entry", ["10.0.0.1/8", "http://tools", "tools:80", "127.1", "2130706433", "", "a b", "*.com"])
def test_malformed_entries_are_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="neither"):
        AllowedNetworks.parse([entry])
