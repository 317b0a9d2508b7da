"""One connection to an MCP server, owned by one task.

The SDK requires that a client is entered and exited in the same task, and cancels that task when the transport dies.
So each connection has a task that does both and waits in between.  Calls may come from any task.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import mcp_types
from mcp import Client
from mcp.client.session import IncomingMessage

from penstock.extensions.tools.mcp.diagnosis import diagnosed
from penstock.extensions.tools.mcp.failures import CONNECTION_CLOSED, McpFailure, protocol_failure
from penstock.extensions.tools.mcp.listings import Listings, Target
from penstock.extensions.tools.mcp.transports import NO_SUCH_TRANSPORT, Transport, statuses_noted, transports
from penstock.pipeline.distribution import own_version
from penstock.services.mcp_config import SecretMask, StdioServer

_WHO = mcp_types.Implementation(name="penstock", version=own_version())

_HTTP = 15.0, 2.0
"""Timeouts in seconds for opening and closing a connection over HTTP."""

_PROGRAM = 60.0, 8.0
"""The same for a program.  It may have to be installed first, and the SDK asks it twice to exit before killing it."""


class McpConnection:
    """A connection: opening, open, or over for good.  It stays in ``connections`` until its task has ended."""

    def __init__(
        self, target: Target, listings: Listings, secrets: SecretMask, connections: set[McpConnection]
    ) -> None:
        self._target = target
        self._listings = listings
        self._secrets = secrets
        self._opening_seconds, self._closing_seconds = _PROGRAM if isinstance(target.config, StdioServer) else _HTTP
        self._client: Client | None = None
        self._opened = asyncio.Event()
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
            return diagnosed(self._error, self._statuses, self._opening_seconds, self._secrets)
        return protocol_failure(CONNECTION_CLOSED, "The connection to the server is closed.")

    async def client(self) -> Client:
        """Wait for the SDK's client and return it; raise `McpFailure` if the connection is over."""
        await self._opened.wait()
        if self._client is None or self.is_over:
            raise self.failure
        return self._client

    def end(self) -> None:
        """Start closing the connection, without waiting.

        A second cancellation would break off the end of the first, and leave a program running.
        """
        self._over.set()
        if not self._opened.is_set() and not self._task.cancelling():
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
            self._opened.set()

    async def _hold(self) -> None:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(self._opening_seconds):
                self._client = await self._open(stack)
            self._statuses.clear()  # a server may refuse one handshake and accept another
            self._opened.set()
            await self._over.wait()
            # Close politely, but cancel that if it takes too long.
            asyncio.get_running_loop().call_later(self._closing_seconds, self._task.cancel)

    async def _open(self, stack: AsyncExitStack) -> Client:
        """Return the SDK's client, which ``stack`` closes.

        If the server does not know the first transport, the second one is tried.
        """
        candidates = tuple(transports(self._target.config, self._target.allowed, self._over.set))
        for transport in candidates[:-1]:
            try:
                return await self._enter(stack, transport)
            except (Exception, BaseExceptionGroup):
                if NO_SUCH_TRANSPORT.isdisjoint(self._statuses):
                    raise
                self._statuses.clear()
                self._over.clear()
        return await self._enter(stack, candidates[-1])

    async def _enter(self, stack: AsyncExitStack, transport: Transport) -> Client:
        client = Client(transport, message_handler=self._on_message, cache=None, client_info=_WHO)
        return await stack.enter_async_context(client)

    async def _on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, mcp_types.ToolListChangedNotification):
            self._listings.forget(self._target.key)
