"""Shown URLs hold no user, password, query or fragment."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.pipeline.urls import HIDDEN, host_of, shown_url

SECRET = "s3cr3t"
SHOWN = re.compile(r"""[a-z][a-z0-9+.-]*://(\[[0-9A-Fa-f:.]+\]|[^\s:/?#@\\\[\]"'<>]*)(:\d{1,5})?""")

PIECES = "http|https|postgresql|:|//|/|@|?|#|&|=|\\|[|]|::1|example.com|8000|%40|user|key=|;|<| |\n|\u202e|"
pieces = st.sampled_from(re.split("[|]", PIECES))
urls = st.lists(st.one_of(pieces, st.text(max_size=3)), max_size=12).map("".join)


@given(urls)
@example("http://a:b@c@d/e?f#g")
def test_a_shown_url_is_a_scheme_and_a_host(url: str) -> None:
    shown = shown_url(url)
    assert shown == HIDDEN or SHOWN.fullmatch(shown.removesuffix(HIDDEN).removesuffix("/"))
    with_path = urlsplit(shown_url(url, with_path=True))
    assert not any((with_path.username, with_path.password, with_path.query, with_path.fragment))


@pytest.mark.parametrize(
    "host", ["example.com", "example.com:8000", "[::1]:8000", "[::1]", "10.0.0.1:1", "bücher.example"]
)
@pytest.mark.parametrize(
    "user", ["", f"{SECRET}@", f"me:{SECRET}@", f"me:{SECRET}%40x@", f"a@{SECRET}@", f":{SECRET}@"]
)
@pytest.mark.parametrize("more", ["", "/", f"?key={SECRET}", f"#{SECRET}", f"/?{SECRET}", f"?a=b#{SECRET}"])
def test_the_host_stays_and_no_secret_does(host: str, user: str, more: str) -> None:
    url = f"https://{user}{host}{more}"
    assert host_of(url) == host
    for shown in (shown_url(url), shown_url(url, with_path=True)):
        assert host in shown
        assert SECRET not in shown


@pytest.mark.parametrize(
    ("url", "shown", "with_path"),
    [
        ("https://a.example/mcp/key", "https://a.example/<redacted>", "https://a.example/mcp/key"),
        ("https://a.example", "https://a.example/", "https://a.example"),
        (f"http://me:{SECRET}/x@a.example", HIDDEN, HIDDEN),
        (f"me:{SECRET}@a.example/x", HIDDEN, HIDDEN),
        (f"http://[{SECRET}", HIDDEN, HIDDEN),
        (f"{SECRET}", HIDDEN, HIDDEN),
        ("postgresql:///base?host=/run", "postgresql:///<redacted>", "postgresql:///base"),
    ],
)
def test_what_is_no_url_is_hidden(url: str, shown: str, with_path: str) -> None:
    assert (shown_url(url), shown_url(url, with_path=True)) == (shown, with_path)
