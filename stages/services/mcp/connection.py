"""One connection to an MCP server, owned by one task.

The SDK wants a client entered and left in the same task, and cancels that task when the transport dies.  So a task of
its own does both, and waits in between; calls may be made from any other.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from mcp import Client

from penstock.stages.services.mcp.diagnosis import diagnosed
from penstock.stages.services.mcp.failure import CONNECTION_CLOSED, Failure, protocol_failure
from penstock.stages.services.mcp.opening import Opening, statuses_noted


class Connection:
    """A connection that is being opened, open, or over for good; ``connections`` holds it until all of it has ended."""

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
        """Whether it is of no more use."""
        return self._over.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether it never came to be."""
        return self.is_over and self._client is None

    @property
    def failure(self) -> Failure:
        """Why it is over."""
        if self._error is not None:
            return diagnosed(self._error, self._statuses, self._opening.seconds, self._opening.secrets)
        return protocol_failure(CONNECTION_CLOSED, "The connection to the server is closed.")

    async def client(self) -> Client:
        """The client, as soon as there is one; raises `Failure`."""
        await self._settled.wait()
        if self._client is None or self.is_over:
            raise self.failure
        return self._client

    def end(self) -> None:
        """Begin to close it."""
        self._over.set()
        if not self._settled.is_set():
            self._task.cancel()

    async def closed(self, seconds: float | None = None) -> None:
        """Wait for its end, for so long."""
        await asyncio.wait({self._task}, timeout=seconds)

    async def _own(self) -> None:
        try:
            with statuses_noted() as self._statuses:
                await self._hold()
        except asyncio.CancelledError:
            # A transport that dies may cancel its task, which nobody else asked for.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - it is told to whoever calls
            self._error = error
        finally:
            self._over.set()
            self._settled.set()

    async def _hold(self) -> None:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(self._opening.seconds):
                self._client = await self._opening.client(stack, self._over, self._statuses)
            self._statuses.clear()  # a server may say no to one handshake and then know another
            self._settled.set()
            await self._over.wait()
            # Politely, but not for ever.
            asyncio.get_running_loop().call_later(self._opening.closing_seconds, self._task.cancel)
