"""The socket of the server, and the HTTP server on it."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web

from penstock.api.http.connections import Runner


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to its address but does not listen yet.

    Binding before the model is loaded reports a used port early.  Until the socket listens, connections are refused.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    return bound


@asynccontextmanager
async def serving(app: web.Application, bound: socket.socket) -> AsyncGenerator[None, None]:
    """Serve ``app`` on a socket for the length of the block."""
    runner = Runner(app)
    await runner.setup()
    try:
        await web.SockSite(runner, bound).start()
        yield
    finally:
        await runner.cleanup()
