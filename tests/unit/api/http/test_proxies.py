"""Who the client of a request is, behind proxies: the last address that is no trusted proxy, whatever it claims."""

from __future__ import annotations

from ipaddress import IPv6Address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from penstock.api.http.proxies import FORWARDED, MOST_HOPS, X_FORWARDED_FOR, Address, AsSent, Proxies, parsed_address

NETWORKS = ("10.0.0.0/8", "192.0.2.7", "fd00::/8")
HEADERS = (X_FORWARDED_FOR, FORWARDED)

trusted = st.one_of(st.ip_addresses(network="10.0.0.0/8"), st.ip_addresses(network="fd00::/8"))
strangers = st.ip_addresses().filter(
    lambda address: (
        not Proxies.parse(NETWORKS).trusts(address) and not (isinstance(address, IPv6Address) and address.ipv4_mapped)
    )
)
texts = st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=60)
claims = texts | st.sampled_from(('"', 'for="', "for=10.0.0.1", 'for=6.6.6.6;x="', "10.0.0.1", "[", ",,,", "::%eth0"))


def headers_of(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


def as_sent(peer: str | None, *pairs: tuple[str, str], header: str = X_FORWARDED_FOR) -> AsSent:
    return Proxies.parse(NETWORKS, header).as_sent(peer, headers_of(*pairs))


@st.composite
def written(draw: st.DrawFn, address: Address, header: str) -> str:
    """Write an address as some proxy does: with a port or a zone, or without."""
    text = str(address)
    if isinstance(address, IPv6Address):
        zone = draw(st.sampled_from(("", "%eth0", "%25a")))
        text = draw(st.sampled_from((f"[{text}{zone}]", f"[{text}]:4711", f"{text}{zone}")))
    else:
        text = draw(st.sampled_from((text, f"{text}:80")))
    if header == X_FORWARDED_FOR:
        return draw(st.sampled_from((text, f" {text} ")))
    quoted = f'"{text}"' if ":" in text else draw(st.sampled_from((text, f'"{text}"')))
    return draw(st.sampled_from(("for={}", "For={};proto=https", 'by="[fd00::1]:1";host=llm.example ; for={}'))).format(
        quoted
    )


@given(st.data(), st.sampled_from(HEADERS), st.lists(claims, max_size=3), strangers, st.lists(trusted, max_size=4))
def test_client_is_the_last_address_that_is_no_proxy(
    data: st.DataObject, header: str, claimed: list[str], client: Address, between: list[Address]
) -> None:
    """Whatever the client has written before its own address, and however the lines are joined."""
    hops = [data.draw(written(address, header)) for address in (client, *between)]
    values = [*claimed, *hops]
    if data.draw(st.booleans()):
        values = [",".join(values)]
    found = as_sent("10.1.2.3", *((header, value) for value in values), header=header)
    assert (found.address, found.is_proxied) == (str(client), True)


@given(strangers, st.lists(st.tuples(st.sampled_from((*HEADERS, "X-Forwarded-Host", "X-Forwarded-Prefix")), claims)))
def test_headers_of_a_stranger_are_not_read(peer: Address, pairs: list[tuple[str, str]]) -> None:
    assert as_sent(str(peer), *pairs) == AsSent(str(peer))


@given(
    st.sampled_from(HEADERS),
    st.sampled_from((None, "", "10.0.0.1", "::ffff:10.0.0.1", "fd00::1%eth0", "unknown")),
    st.lists(
        st.tuples(
            st.sampled_from((*HEADERS, "X-Forwarded-Host", "X-Forwarded-Prefix")),
            claims | st.binary(max_size=20).map(lambda data: data.decode("utf-8", "surrogateescape")),
        ),
        max_size=5,
    ),
)
@example(X_FORWARDED_FOR, "10.0.0.1", [(X_FORWARDED_FOR, ",".join(["10.0.0.1"] * 1000))])
@example(FORWARDED, "10.0.0.1", [(FORWARDED, ",".join(['for="[fd00::1]"'] * 1000))])
@example(X_FORWARDED_FOR, "10.0.0.1", [(X_FORWARDED_FOR, "1" * 8000)])
def test_no_header_fails(header: str, peer: str | None, pairs: list[tuple[str, str]]) -> None:
    found = as_sent(peer, *pairs, header=header)
    assert found.address == peer or parsed_address(found.address or "") is not None


def test_address_behind_garbage_is_the_proxy_that_wrote_it() -> None:
    for garbage in ("unknown", "_hidden", "", "300.1.1.1", "1.2.3.4.5", "example.com"):
        assert as_sent("10.0.0.1", (X_FORWARDED_FOR, f"6.6.6.6, {garbage}, 10.0.0.9")).address == "10.0.0.9"


def test_client_within_the_trusted_networks_is_the_first_address() -> None:
    assert as_sent("10.0.0.1", (X_FORWARDED_FOR, "10.0.0.3, 10.0.0.2")).address == "10.0.0.3"


def test_proxies_are_followed_up_to_a_number() -> None:
    near = ", ".join(["10.0.0.2"] * (MOST_HOPS - 1))
    assert as_sent("10.0.0.1", (X_FORWARDED_FOR, f"6.6.6.6, 192.0.2.7, {near}")).address == "192.0.2.7"
    assert as_sent("10.0.0.1", (X_FORWARDED_FOR, f"6.6.6.6, {near}")).address == "6.6.6.6"


def test_only_the_header_of_the_settings_is_read() -> None:
    """A proxy that sets one of the two passes the other on as the client has sent it."""
    both = ((X_FORWARDED_FOR, "1.1.1.1"), (FORWARDED, "for=2.2.2.2;host=two"), ("X-Forwarded-Host", "one"))
    assert as_sent("10.0.0.1", *both) == AsSent("1.1.1.1", "one", is_proxied=True)
    assert as_sent("10.0.0.1", *both, header=FORWARDED) == AsSent("2.2.2.2", "two", is_proxied=True)


def test_host_is_that_of_the_proxy_that_the_client_called() -> None:
    chain = "for=6.6.6.6;host=fake, for=1.1.1.1;host=llm.example:8443, for=10.0.0.2;host=inner"
    assert as_sent("10.0.0.1", (FORWARDED, chain), header=FORWARDED).host == "llm.example:8443"
    assert as_sent("10.0.0.1", ("X-Forwarded-Host", "fake, llm.example")).host == "llm.example"


@pytest.mark.parametrize(
    ("sent", "prefix"),
    [
        ("/llm", "/llm"),
        ("/llm/", "/llm"),
        ("/a, /b/c", "/b/c"),
        ("/", ""),
        ("", ""),
        ("llm", ""),
        ("//evil.example", ""),
        ("/a//b", ""),
        ("https://evil.example", ""),
        ('/"><script>', ""),
        ("/a b", ""),
        ("/a?b", ""),
        ("/" + "a" * 5000, ""),
    ],
)
def test_prefix_is_a_path_or_none(sent: str, prefix: str) -> None:
    assert as_sent("10.0.0.1", ("X-Forwarded-Prefix", sent)).prefix == prefix


@pytest.mark.parametrize("network", ["10.0.0.1/8", "proxy.example", "10.0.0.0/33"])
def test_network_that_is_none_is_refused(network: str) -> None:
    with pytest.raises(ValueError, match=network):
        Proxies.parse([network])
