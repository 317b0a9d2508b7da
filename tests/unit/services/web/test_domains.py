from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.tools import WebFilters
from penstock.services.web.domains import is_within

labels = st.from_regex(r"[a-z0-9]([a-z0-9]{0,5}[a-z0-9])?", fullmatch=True)
hosts = st.lists(labels, min_size=2, max_size=4).map(".".join)
PLACES = ("https://{}", "http://{}/a?b=https://other.example", "https://{}:8443/#x", "HTTPS://{}./")


@given(host=hosts, domain=hosts, place=st.sampled_from(PLACES))
def test_host_is_within_its_own_domain_and_those_around_it(host: str, domain: str, place: str) -> None:
    around = host == domain or host.endswith(f".{domain}")
    assert is_within(place.format(host), [domain]) is around
    assert is_within(place.format(f"{host}.{domain}"), [domain])
    assert not is_within(place.format(f"x{domain}"), [domain])
    assert is_within(place.format(host), ())


@pytest.mark.parametrize(
    "url",
    [
        *("https://example.org.evil.test/", "https://evil.test/example.org", "https://evil.test#.example.org"),
        *("https://example.org@evil.test/", "https://notexample.org", "http://[::1", "", "https://[::1]/example.org"),
    ],
)
def test_url_that_only_looks_like_a_domain_is_outside(url: str) -> None:
    assert not is_within(url, ["example.org"])


@pytest.mark.parametrize(
    ("sent", "host"),
    [("Example.ORG", "example.org"), ("example.org.", "example.org"), ("b\u00fccher.example", "xn--bcher-kva.example")],
)
def test_domains_are_written_as_in_urls(sent: str, host: str) -> None:
    assert WebFilters(allowed_domains=[sent]).allowed_domains == [host]
    assert is_within(f"https://www.{sent}/", [host])


@pytest.mark.parametrize(
    "sent", ["https://a.example", "a.example/x", "*.a.example", "a:80", "", "a b", "u@a", ".", "[::1]"]
)
def test_what_is_no_domain_is_refused(sent: str) -> None:
    with pytest.raises(InvalidRequest):
        WebFilters(allowed_domains=[sent])


def test_empty_list_and_unknown_filter_are_refused() -> None:
    """An empty list might mean none or all."""
    sent: list[dict[str, list[str]]] = [{"allowed_domains": []}, {"languages": ["fr"]}]
    for filters in sent:
        with pytest.raises(ValidationError):
            WebFilters.model_validate(filters)
