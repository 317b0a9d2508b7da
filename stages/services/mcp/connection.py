"""One connection to an MCP server, owned by one task.

The SDK requires that a client is entered and exited in the same task, and cancels that task when the transport dies.
So each connection has a task that does both and waits in between.  Calls may come from any task.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from mcp import Client

from penstock.stages.services.mcp.diagnosis import diagnosed
from penstock.stages.services.mcp.failure import CONNECTION_CLOSED, McpFailure, protocol_failure
from penstock.stages.services.mcp.opening import Opening, statuses_noted


class Connection:
    """A connection: opening, open, or over for good.  It stays in ``connections`` until its task has ended."""

    def __init__(self, opening: Opening, connections: set[Connection]) -> None:
        self._opening = opening
        self._client: Client | None = None
        self._settled = asyncio.Event()
        self._over = asyncio.Event()
        self._error: BaseException | None = None
        self._statuses: list[int] = []
        self._task = asyncio.create_task(self._own(), name="mcp connection")
        connections.add(self)
        self._task.add_done_callback(lambda _: connections.discard(self))

    @property
    def is_over(self) -> bool:
        """True if the connection can no longer be used."""
        return self._over.is_set()

    @property
    def has_failed(self) -> bool:
        """True if the connection could not be opened."""
        return self.is_over and self._client is None

    @property
    def failure(self) -> McpFailure:
        """The reason why the connection is over, for the client."""
        if self._error is not None:
            return diagnosed(self._error, self._statuses, self._opening.seconds, self._opening.secrets)
        return protocol_failure(CONNECTION_CLOSED, "The connection to the server is closed.")

    async def client(self) -> Client:
        """Wait for the SDK's client and return it; raise `McpFailure` if the connection is over."""
        await self._settled.wait()
        if self._client is None or self.is_over:
            raise self.failure
        return self._client

    def end(self) -> None:
        """Start closing the connection, without waiting."""
        self._over.set()
        if not self._settled.is_set():
            self._task.cancel()

    async def closed(self, seconds: float | None = None) -> None:
        """Wait until the connection is closed, for at most ``seconds``; None waits without limit."""
        await asyncio.wait({self._task}, timeout=seconds)

    async def _own(self) -> None:
        try:
            with statuses_noted() as self._statuses:
                await self._hold()
        except asyncio.CancelledError:
            # A dying transport may cancel this task by itself: raise only if our own code has cancelled it.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - `failure` reports it
            self._error = error
        finally:
            self._over.set()
            self._settled.set()

    async def _hold(self) -> None:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(self._opening.seconds):
                self._client = await self._opening.client(stack, self._over, self._statuses)
            self._statuses.clear()  # a server may refuse one handshake and accept another
            self._settled.set()
            await self._over.wait()
            # Close politely, but cancel that if it takes too long.
            asyncio.get_running_loop().call_later(self._opening.closing_seconds, self._task.cancel)
