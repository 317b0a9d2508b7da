"""The route of the WebSocket transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from aiohttp import hdrs, web

from penstock.api.dialect import Edge
from penstock.api.http.auth import OWNER
from penstock.api.http.errors import STREAMING
from penstock.api.http.request_body import HELD
from penstock.api.socket.connection import CLOSE_WAIT, Connection
from penstock.api.socket.incoming import Incoming
from penstock.api.socket.memory import LaneMemory
from penstock.pipeline import metrics
from penstock.pipeline.errors import InvalidRequest


class Socket(web.WebSocketResponse):
    """A WebSocket whose frames are read by `Incoming`, and not by aiohttp, which has no hook for that."""

    incoming: Incoming

    def _post_start(self, request: web.BaseRequest, protocol: str | None, writer: Any) -> None:
        assert isinstance(request, web.Request)
        http: Any = request.protocol
        self.incoming = Incoming(http, request.client_max_size, request.app[HELD], request.get(OWNER, ""))
        reader: Any = self.incoming
        self._ws_protocol, self._writer, self._reader = protocol, writer, reader
        http.set_parser(SimpleNamespace(feed_data=self.incoming.receive, feed_eof=self.incoming.feed_eof))
        http.keep_alive(False)


@dataclass(frozen=True)
class Sockets:
    """The WebSocket transport over the edge of a dialect."""

    edge: Edge

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Return the routes under ``base``."""
        return (web.get(f"{base}/responses", self.serve, allow_head=False),)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serve the responses of one client over a WebSocket."""
        if request.headers.get(hdrs.UPGRADE, "").lower() != "websocket":
            raise web.HTTPMethodNotAllowed(request.method, (hdrs.METH_POST,))
        _check_handshake(request)
        socket = Socket(compress=False, timeout=CLOSE_WAIT)
        await socket.prepare(request)
        request[STREAMING] = True
        opened = self.edge.sockets
        connection = Connection(
            socket,
            request=request,
            edge=self.edge,
            memory=LaneMemory(opened.remembered, request[OWNER]),
            incoming=socket.incoming,
        )
        opened.connections.add(connection)
        try:
            with metrics.WEBSOCKETS.track_inprogress():
                await connection.run()
        finally:
            opened.connections.discard(connection)
        return socket


def _check_handshake(request: web.Request) -> None:
    """Raise `InvalidRequest` for a header of the handshake that is not ASCII, which aiohttp could not read."""
    for name, value in request.headers.items():
        if name.lower().startswith(("connection", "sec-websocket-")) and not value.isascii():
            raise InvalidRequest(f"The header {name} is not ASCII.")
