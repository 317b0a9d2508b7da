"""The requests that come through proxies: whose they are, and how many a client may have at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable

from aiohttp import web

from penstock.api.http.errors import Handler
from penstock.api.http.proxies import AS_SENT, Proxies, client_of, parsed_address
from penstock.pipeline.errors import LimitReached

MOST_OF_CLIENT: web.AppKey[int] = web.AppKey("most_of_client", int)
"""The most connections of one client, or as many requests through proxies."""

RETRY_SECONDS = 1.0
"""Seconds after which a client with too many requests may try again."""


class ProxiedRequests:
    """The requests that run, by client, of those that come through proxies; these share the proxies' connections.

    The middleware returns what is to be awaited where it has nothing to do later: an open stream would hold its frame.
    """

    def __init__(self, proxies: Proxies) -> None:
        self._proxies = proxies
        self._running = Counter[str]()

    @web.middleware
    def identify(self, request: web.Request, handler: Handler) -> Awaitable[web.StreamResponse]:
        """Set `AS_SENT` of a request."""
        request[AS_SENT] = self._proxies.as_sent(request.remote, request.headers)
        return handler(request)

    @web.middleware
    def limit(self, request: web.Request, handler: Handler) -> Awaitable[web.StreamResponse]:
        """Raise `LimitReached` if a client has as many requests as it could have connections."""
        sent, most = request[AS_SENT], request.config_dict.get(MOST_OF_CLIENT)
        if not sent.is_proxied or most is None:
            return handler(request)
        return self._counted(client_of(parsed_address(sent.address or "")), most, request, handler)

    async def _counted(self, client: str, most: int, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._running[client] >= most:
            raise LimitReached(
                f"{client} has {most} requests at once, the most that one client may have.", RETRY_SECONDS
            )
        self._running[client] += 1
        try:
            return await handler(request)
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]
