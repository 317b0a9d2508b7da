"""The hosts and origins from which requests are taken, so that no foreign web page can drive a server without keys.

A browser sends requests of any page to any address, also to ``127.0.0.1``.  A server without API keys therefore checks
three headers.  ``Host`` must be an address, a loopback name or an allowed name: a page whose own name resolves to this
machine (DNS rebinding) sends that name.  ``Origin`` must be this server or an allowed origin.  A body must be
declared as JSON, because a page may send other types to foreign servers without a preflight; only where files are
uploaded, it is a form.

An allowed origin gets the headers of CORS (https://fetch.spec.whatwg.org/#http-cors-protocol), with and without keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from penstock.api.http.auth import is_open
from penstock.api.http.openapi import JSON, body_types
from penstock.api.http.proxies import AS_SENT
from penstock.pipeline.errors import ForeignHost, ForeignOrigin, UnsupportedMediaType
from penstock.pipeline.protocol.params.json_body import shortened

ANY_ORIGIN = "*"
PREFLIGHT_SECONDS = "600"
"""Seconds for which a browser may keep the answer to a preflight."""


class Origins:
    """The rules of one server; ``hosts`` are the names that it is called, and ``keyed`` means that it has API keys."""

    def __init__(self, hosts: Iterable[str] = (), allowed: Iterable[str] = (), *, keyed: bool = False) -> None:
        self._hosts = frozenset(host.lower() for host in hosts if host)
        self._allowed = frozenset(origin.lower().rstrip("/") for origin in allowed)
        self._keyed = keyed

    def check(self, request: web.Request) -> web.Response | None:
        """Return the answer of a preflight of an allowed origin; None for other requests.

        For those of foreign pages, raises `ForeignHost`, `ForeignOrigin` or `UnsupportedMediaType`.
        """
        if not self._keyed:
            self._check_host(request)
            self._check_origin(request)
            _check_content_type(request)
        if request.method == hdrs.METH_OPTIONS and self._allows(request.headers.get(hdrs.ORIGIN)):
            return web.Response(status=204)
        return None

    async def add_headers(self, request: web.Request, answer: web.StreamResponse) -> None:
        """Add the headers of CORS to an answer, before its headers are sent."""
        origin = request.headers.get(hdrs.ORIGIN)
        if not self._allowed:
            return
        answer.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if not self._allows(origin):
            return
        answer.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = str(origin)
        answer.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = "*"
        if request.method == hdrs.METH_OPTIONS:
            wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "*")
            answer.headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
            answer.headers[hdrs.ACCESS_CONTROL_ALLOW_METHODS] = "GET, POST, DELETE"
            answer.headers[hdrs.ACCESS_CONTROL_MAX_AGE] = PREFLIGHT_SECONDS
            if "Access-Control-Request-Private-Network" in request.headers:
                answer.headers["Access-Control-Allow-Private-Network"] = "true"

    def _allows(self, origin: str | None) -> bool:
        return origin is not None and (origin.lower() in self._allowed or ANY_ORIGIN in self._allowed)

    def _check_host(self, request: web.Request) -> None:
        # A page can send the header of a proxy, too, if the proxy passes it on: neither name may be a foreign one.
        for sent in dict.fromkeys((_host(request), _called(request))):
            host = _host_name(sent)
            if is_open(request) or host in self._hosts or _is_address_or_loopback(host):
                continue
            if not host:
                raise ForeignHost("Send the name of this server in the header Host.")
            name = shortened(host)
            raise ForeignHost(
                f"This server is not called {name!r}. Start it with --allow-host {name}, or with API keys."
            )

    def _check_origin(self, request: web.Request) -> None:
        origin = request.headers.get(hdrs.ORIGIN)
        if self._allows(origin):
            return
        if origin is None:
            follows_link = is_open(request) and request.headers.get("Sec-Fetch-Mode", "").lower() == "navigate"
            if follows_link or request.headers.get("Sec-Fetch-Site", "").lower() != "cross-site":
                return
        elif origin.lower() in {f"{scheme}://{_called(request).lower()}" for scheme in ("http", "https")}:
            return
        site = shortened(origin or "another site")
        raise ForeignOrigin(f"Pages of {site} may not use this server. Start it with --allow-origin to allow it.")


def _check_content_type(request: web.Request) -> None:
    if not request.can_read_body or request.match_info.http_exception:
        return  # the second is the answer to a URL that has no route
    kinds = body_types(request)
    if request.content_type not in kinds and not (kinds[0] == JSON and request.content_type.endswith("+json")):
        raise UnsupportedMediaType(f"Send the body with the header 'Content-Type: {kinds[0]}'.")


def _host(request: web.Request) -> str:
    # `web.Request.host` would look up the name of this machine, which may block the event loop.
    return request.headers.get(hdrs.HOST, "")


def _called(request: web.Request) -> str:
    """Return the host that the client named, also if a proxy has replaced the header ``Host``."""
    return request[AS_SENT].host or _host(request)


def _host_name(host: str) -> str:
    """Return the name in a ``Host`` header, without a port and the brackets of IPv6."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:  # a bracket that stays open
        return host.lower()


def _is_address_or_loopback(host: str) -> bool:
    """Return True for a name that no foreign DNS zone can hold."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
