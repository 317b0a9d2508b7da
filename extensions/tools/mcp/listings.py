"""Cache the tool listings of MCP servers."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.extensions.tools.mcp.failures import CONNECTION_CLOSED, protocol_failure
from penstock.pipeline.protocol.items import ListedTool
from penstock.pipeline.tasks import cancelled
from penstock.services.mcp_config import ServerConfig
from penstock.services.web.ssrf import AllowedNetworks

Key: TypeAlias = tuple[str, bytes]
"""A server's URL or label, and a hash of the request's headers, as the tools offered may depend on them."""
Tools: TypeAlias = tuple[ListedTool, ...]


@dataclass(frozen=True)
class Target:
    """A server as named by a request.

    ``is_shared`` is True if all responses share a connection: it is the operator's, and the request sends no headers.
    ``allowed`` are the networks permitted besides public addresses; None permits any address.
    """

    config: ServerConfig
    key: Key
    is_shared: bool = False
    allowed: AllowedNetworks | None = None


@dataclass(frozen=True)
class Listing:
    """The tools of a server, and its instructions for the model.

    ``unprompted`` are the names of tools that the prompt shall not describe (vLLM's ``include_in_prompt: false``).
    """

    tools: Tools
    instructions: str = ""
    unprompted: frozenset[str] = frozenset()


class Listings:
    """Listings of the latest ``most`` servers, valid for ``seconds``.  Concurrent requests for one are merged."""

    def __init__(self, seconds: float, most: int = 64, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._most = most
        self._clock = clock
        self._known: OrderedDict[Key, tuple[float, Listing]] = OrderedDict()
        self._asking: dict[Key, asyncio.Task[Listing]] = {}
        self._tasks: set[asyncio.Task[Listing]] = set()

    async def get(self, key: Key, ask: Callable[[], Coroutine[Any, Any, Listing]]) -> Listing:
        """Return the listing of a server, fetched by ``ask`` if it is not cached.

        Errors raised by ``ask`` are passed on and not cached.  Cancelling one caller does not affect the others.
        """
        if (listing := self.known(key)) is not None:
            return listing
        if (task := self._asking.get(key)) is None:
            task = self._asking[key] = asyncio.create_task(self._ask(key, ask))
            self._tasks.add(task)
            task.add_done_callback(self._answered)
        await asyncio.wait({task})
        if task.cancelled():
            raise protocol_failure(CONNECTION_CLOSED, "The request to the server was cancelled.")
        return task.result()

    def known(self, key: Key) -> Listing | None:
        """Return the cached listing, or None if there is none or it has expired."""
        at, listing = self._known.get(key, (-self._seconds, None))
        return listing if self._clock() - at < self._seconds else None

    def tool(self, key: Key, name: str) -> ListedTool | None:
        """Return a tool of a cached listing, or None."""
        listing = self.known(key)
        return next((tool for tool in listing.tools if tool.name == name), None) if listing else None

    def forget(self, key: Key) -> None:
        """Drop a listing that has changed.  A request in flight may return the old one, so it is not cached either."""
        self._known.pop(key, None)
        self._asking.pop(key, None)

    async def close(self) -> None:
        await cancelled(self._tasks)

    async def _ask(self, key: Key, ask: Callable[[], Coroutine[Any, Any, Listing]]) -> Listing:
        try:
            listing = await ask()
        finally:
            is_wanted = self._asking.get(key) is asyncio.current_task()
            if is_wanted:
                del self._asking[key]
        if is_wanted:
            self._remember(key, listing)
        return listing

    def _remember(self, key: Key, listing: Listing) -> None:
        self._known[key] = (self._clock(), listing)
        self._known.move_to_end(key)
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def _answered(self, task: asyncio.Task[Listing]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: callers get it from `get`
