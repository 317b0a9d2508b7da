"""The open WebSocket connections of a server, and the responses that they remember."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from penstock.pipeline.protocol.history import History
from penstock.services.lru_cache import LruCache

MOST_REMEMBERED = 2**29
"""Bytes of all histories that a server remembers for its connections; the least recently used are forgotten first."""


@dataclass(frozen=True)
class Latest:
    """The latest response of a lane."""

    response_id: str
    history: History
    size: int
    """The approximate number of bytes of the history."""


class OpenSocket(Protocol):
    """An open connection."""

    async def close(self) -> None:
        """Close the connection because the server stops."""
        ...


@dataclass
class OpenSockets:
    """The open connections of a server, to close when it stops."""

    connections: set[OpenSocket] = field(default_factory=set)
    remembered: LruCache[Latest] = field(default_factory=lambda: LruCache(MOST_REMEMBERED, MOST_REMEMBERED // 2))

    async def close(self, _: web.Application) -> None:
        """Close all connections."""
        await asyncio.gather(*(connection.close() for connection in self.connections))
