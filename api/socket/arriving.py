"""The message that is arriving on a connection: aiohttp keeps its bytes, and they count as those of a body do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from aiohttp import WebSocketError, WSCloseCode, web

from penstock.api.http.request_body import HELD, SECONDS, SMALL
from penstock.pipeline.errors import ServerBusy


@dataclass
class Arriving:
    """Stands between the connection of ``request`` and aiohttp's parser, and counts what the parser keeps.

    A message that is larger than the server can hold now, or that takes too long, closes the connection.
    """

    request: web.Request
    messages: Any
    """aiohttp's queue of the messages that have arrived."""
    parser: Any
    _count: int = 0
    _held: int = 0
    _timer: asyncio.TimerHandle | None = None

    @classmethod
    def on(cls, socket: web.WebSocketResponse, request: web.Request) -> Arriving:
        """Count what arrives on an open socket."""
        protocol: Any = request.protocol
        arriving = cls(request, socket._reader, protocol._payload_parser)  # noqa: SLF001 - aiohttp has no hook
        protocol._payload_parser = arriving  # noqa: SLF001
        return arriving

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Pass bytes on to the parser; return True, as the parser does, if the connection is to be closed."""
        self._count += len(data)
        if self._count > SMALL:
            try:
                self.request.app[HELD].take(self._count - self._held, self._count, self.request.client_max_size)
            except ServerBusy as error:
                self._fail(WSCloseCode.TRY_AGAIN_LATER, error.message)
                return True, b""
            self._held = self._count
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(SECONDS, self._expire)
        result: tuple[bool, bytes] = self.parser.feed_data(data)
        return result

    def feed_eof(self) -> None:
        """End the parser with the connection."""
        self.parser.feed_eof()

    def release(self) -> None:
        """Stop counting: the message was taken, or the connection has ended."""
        self.request.app[HELD].give(self._held)
        self._count = self._held = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if not self.messages._buffer:  # noqa: SLF001 - else the message is whole, and waits to be taken
            self._fail(WSCloseCode.POLICY_VIOLATION, f"The message did not arrive within {SECONDS:.0f} seconds.")

    def _fail(self, code: WSCloseCode, message: str) -> None:
        self.messages.set_exception(WebSocketError(code, message))
