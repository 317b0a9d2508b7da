"""Fetching pages: which addresses are reached, and how much is read."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from penstock.extensions.tools.browser.calls import CallFailed
from penstock.extensions.tools.browser.reader import LARGEST_PAGE, Fetched, Reader
from penstock.services.web import fetch as fetching
from penstock.services.web.fetch import guarded_connector
from penstock.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks, Blocked
from tests.support.tool_servers import LOOPBACK, answering, web_server

pytestmark = pytest.mark.io


class Names(AbstractResolver):
    """A resolver of test names: each lookup gives the next address of a name, and the last one stays."""

    def __init__(self, **addresses: list[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = self._addresses[host.partition(".")[0]]
        address = found.pop(0) if len(found) > 1 else found[0]
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=_family(address), proto=0, flags=socket.AI_NUMERICHOST
            )
        ]

    async def close(self) -> None:
        pass


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


async def fetched(
    url: str, allowed: AllowedNetworks = NOTHING_ALLOWED, resolver: AbstractResolver | None = None
) -> Fetched:
    reader = Reader(allowed, resolver)
    try:
        return await reader.fetch(url)
    finally:
        await reader.close()


async def secret(request: web.Request) -> web.StreamResponse:
    """Answer with a page that must not be reached, or redirect to ``url``."""
    if request.path == "/to":
        raise web.HTTPFound(request.query["url"])
    return web.Response(text="secret", headers={"X-Host": request.host})


@pytest.fixture
async def inside() -> AsyncIterator[str]:
    async with web_server(secret) as url:
        yield url


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
        "0x7f.1",
        "127.1",
        "2130706433",
        "0177.0.0.1",
        "１２７.0.0.1",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
    ],
)
async def test_private_address_is_refused_in_any_notation(inside: str, host: str) -> None:
    port = inside.rpartition(":")[2]
    for url in (f"http://{host}:{port}/", f"http://{host}/", f"https://{host}/"):
        with pytest.raises(CallFailed):
            await fetched(url)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "169.254.169.254", "[::1]", "10.0.0.1", "[fd00::1]", "[::ffff:10.0.0.1]"]
)
async def test_private_address_is_refused_before_connecting(host: str) -> None:
    with pytest.raises(CallFailed, match="address is not allowed"):
        await fetched(f"http://{host}/latest/meta-data/")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///etc/passwd", "Only http"),
        ("ftp://example.com/", "Only http"),
        ("gopher://127.0.0.1/", "Only http"),
        ("data:text/html,x", "Only http"),
        ("http:///x", "Only http"),
        ("/relative", "Only http"),
        ("http://user:pass@example.com/", "user or a password"),
        ("http://user@example.com/", "user or a password"),
        ("http://example.com:99999/", "not a URL"),
        ("http://[::1/", "not a URL"),
        ("http://e.com/" + "x" * 5000, "too long"),
    ],
)
async def test_urls_other_than_web_urls_are_refused(url: str, words: str) -> None:
    with pytest.raises(CallFailed, match=words):
        await fetched(url, LOOPBACK)


async def test_allowed_networks_and_hosts_are_reached(inside: str) -> None:
    port = inside.rpartition(":")[2]
    assert (await fetched(inside, LOOPBACK)).body == b"secret"
    names = Names(tools=["127.0.0.1"])
    allowed = AllowedNetworks.parse(["tools.internal"])
    assert (await fetched(f"http://tools.internal:{port}/", allowed, names)).body == b"secret"
    with pytest.raises(CallFailed):
        await fetched(f"http://127.0.0.1:{port}/", allowed, names)


async def test_public_name_of_a_private_address_is_refused(inside: str) -> None:
    port = inside.rpartition(":")[2]
    for addresses in (["127.0.0.1"], ["::1"], ["169.254.169.254"]):
        with pytest.raises(CallFailed, match="address is not allowed"):
            await fetched(f"http://rebound.example:{port}/", resolver=Names(rebound=addresses))


async def test_rebinding_host_is_checked_every_time() -> None:
    connector = guarded_connector(LOOPBACK, Names(rebound=["127.0.0.1", "10.0.0.1"]))
    async with web_server(secret) as url, aiohttp.ClientSession(connector=connector) as session:
        port = url.rpartition(":")[2]
        async with session.get(f"http://rebound.example:{port}/", headers={"Connection": "close"}) as answer:
            assert await answer.text() == "secret"
        with pytest.raises(aiohttp.ClientConnectorError) as refused:
            await session.get(f"http://rebound.example:{port}/")
        assert isinstance(refused.value.os_error, Blocked)


async def test_public_addresses_are_open_on_web_ports_only() -> None:
    with pytest.raises(CallFailed, match="address is not allowed"):
        await fetched("http://mail.example:25/", resolver=Names(mail=["93.184.216.34"]))


@pytest.mark.parametrize(
    "target",
    [
        "http://user:pass@127.0.0.1:{port}/",
        "http://127.0.0.2:{port}/",
        "http://10.0.0.1/",
        "http://[::1]/",
        "file:///etc/passwd",
    ],
)
async def test_every_redirect_is_checked(target: str) -> None:
    allowed = AllowedNetworks.parse(["127.0.0.1"])
    async with web_server(secret) as url:
        where = target.format(port=url.rpartition(":")[2])
        with pytest.raises(CallFailed):
            await fetched(f"{url}/to?url={where}", allowed)


async def test_redirects_are_followed_up_to_a_limit() -> None:
    async with web_server(secret) as url:
        page = await fetched(f"{url}/to?url=/there", LOOPBACK)
        assert (page.url, page.body) == (f"{url}/there", b"secret")

        async def circle(request: web.Request) -> web.StreamResponse:
            raise web.HTTPFound("/again")

        async with web_server(circle) as round_and_round:
            with pytest.raises(CallFailed, match="too many redirects"):
                await fetched(round_and_round, LOOPBACK)


async def test_gzip_bomb_and_endless_body_are_cut() -> None:

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/bomb":
            return web.Response(
                body=gzip.compress(b"a" * (40 << 20)), content_type="text/plain", headers={"Content-Encoding": "gzip"}
            )
        stream = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await stream.prepare(request)
        while True:
            await stream.write(b"x" * (1 << 16))

    async with web_server(answer) as url:
        for path in ("/bomb", "/endless"):
            assert len((await fetched(url + path, LOOPBACK)).body) == LARGEST_PAGE


async def test_slow_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_SECONDS", 0.2)

    async def drip(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await stream.prepare(request)
        while True:
            await stream.write(b"x")
            await asyncio.sleep(0.01)

    async with web_server(drip) as url:
        with pytest.raises(CallFailed, match="too long"):
            await fetched(url, LOOPBACK)


@pytest.mark.parametrize(
    ("headers", "body", "kind"),
    [
        ({"Content-Type": "text/html; charset=ISO-8859-1"}, b"x", (True, "ISO-8859-1")),
        ({"Content-Type": "application/xhtml+xml"}, b"x", (True, "")),
        ({"Content-Type": "text/markdown"}, b"x", (False, "")),
        ({"Content-Type": "application/ld+json"}, b"{}", (False, "")),
        ({"Content-Type": "application/pdf"}, b"%PDF", "type application/pdf"),
        ({"Content-Type": "image/png"}, b"x", "type image/png"),
        ({"Content-Type": "nonsense"}, b"x", "type application/octet-stream"),
    ],
)
async def test_only_text_is_read(headers: dict[str, str], body: bytes, kind: Any) -> None:

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, headers=headers)

    async with web_server(answer) as url:
        if isinstance(kind, str):
            with pytest.raises(CallFailed, match=kind):
                await fetched(url, LOOPBACK)
        else:
            page = await fetched(url, LOOPBACK)
            assert (page.is_html, page.charset) == kind


@pytest.mark.parametrize(("body", "is_html"), [(b" <p>x", True), (b"plain", False), (b"\x00\x01", None)])
async def test_type_of_an_untyped_page_is_detected(body: bytes, is_html: bool | None) -> None:
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body) as port:
        url = f"http://127.0.0.1:{port}/"
        if is_html is None:
            with pytest.raises(CallFailed, match="not text"):
                await fetched(url, LOOPBACK)
        else:
            assert (await fetched(url, LOOPBACK)).is_html is is_html


@pytest.mark.parametrize("status", [404, 403, 500, 304])
async def test_error_status_is_reported(status: int) -> None:

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status)

    async with web_server(answer) as url:
        with pytest.raises(CallFailed, match=f"status {status}"):
            await fetched(url, LOOPBACK)


async def test_broken_connections_are_failures() -> None:
    async with answering(b"\x00garbage\r\n\r\n") as port:
        url = f"http://127.0.0.1:{port}/"
        with pytest.raises(CallFailed, match="No readable answer came"):
            await fetched(url, LOOPBACK)
    with pytest.raises(CallFailed, match="No connection"):
        await fetched(url, LOOPBACK)
    with pytest.raises(CallFailed, match="no such host"):
        await fetched("http://nowhere.invalid/", LOOPBACK)


async def test_cookies_are_not_kept() -> None:
    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Cookie"))
        return web.Response(text="x", headers={"Set-Cookie": "who=me"})

    async with web_server(answer) as url:
        named = f"http://site.example:{url.rpartition(':')[2]}/"
        reader = Reader(LOOPBACK, Names(site=["127.0.0.1"]))
        await reader.fetch(named)
        await reader.fetch(named)
        await reader.close()
    assert seen == [None, None]
