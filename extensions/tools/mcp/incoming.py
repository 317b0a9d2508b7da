"""Messages of an MCP server, counted before they are converted.

The SDK parses a message and makes objects of it on the event loop, in time that grows with the number of its values.
So the values of a message are counted in its bytes, before the SDK sees them, and the parts of a result, the tools of a
listing and the server's own requests are counted before objects are made of them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import httpx2
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from penstock.pipeline.protocol.sse import EventSplitter, TooLong
from penstock.services.foreign import LARGEST, LARGEST_BYTES, Unreadable, excess_of, read_whole

MOST_ENTRIES: Final[Mapping[str, int]] = {"content": 1_000, "tools": 2_000, "inputRequests": 100}
"""Entries of the lists in a result, each of which the SDK makes an object of."""

MOST_ASKED: Final = 200
"""Requests and notifications of a server in `PERIOD_SECONDS`, each of which takes a task of the SDK.

Notifications of progress and of the log do not count here: they are left out, as penstock does not read them.
"""

MOST_MESSAGES: Final = 20_000
"""Messages of any kind in `PERIOD_SECONDS`."""

PERIOD_SECONDS: Final = 60.0

_UNREAD: Final = frozenset({"notifications/progress", "notifications/message"})
_INVALID: Final = -32600


class TooMuch(httpx2.SSEError, httpx2.StreamError):
    """A message is larger than the limits, or the server sends too many."""


async def bound(response: httpx2.Response) -> None:
    """Limit what an answer may hold; to be called with each answer, before its body is read.

    Raises `httpx2.DecodingError` for a compressed answer: a few compressed bytes may expand to gigabytes.
    """
    if response.headers.get("content-encoding", "identity") != "identity":
        await response.aclose()
        raise httpx2.DecodingError("compressed, which was not asked for")
    if isinstance(response.stream, httpx2.AsyncByteStream):
        is_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        response.stream = _Bounded(response.stream, is_stream=is_stream)


class _Bounded(httpx2.AsyncByteStream):
    """A body that gives each of its messages whole, and raises `TooMuch` before one that exceeds the limits."""

    def __init__(self, inner: httpx2.AsyncByteStream, *, is_stream: bool) -> None:
        self._inner = inner
        self._is_stream = is_stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            if self._is_stream:
                blocks = EventSplitter(LARGEST_BYTES)
                async for chunk in self._inner:
                    for block in blocks.feed(chunk):
                        await _check(block.data or b"")
                        yield block.raw
            else:
                body = await read_whole(self._inner, LARGEST_BYTES)
                await _check(body)
                yield body
        except (TooLong, Unreadable) as error:
            raise TooMuch(f"more than {LARGEST_BYTES} bytes") from error

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _check(message: bytes) -> None:
    """Raise `TooMuch` for a message that would take the SDK long."""
    if excess := await excess_of(message, LARGEST):
        raise TooMuch(excess)


class Messages:
    """Decides about each message of a connection, before the SDK makes objects of its parts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._asked = self._sent = 0

    def admitted(self, message: Any) -> Any:
        """Return the message that the SDK may have, None if it is to be left out; raise `TooMuch` for a flood."""
        if not isinstance(message, SessionMessage):
            return message
        self._count()
        match message.message:
            case JSONRPCResponse(id=request_id, result=result):
                # MCP: a result without a type is complete; the SDK would refuse it
                result.setdefault("resultType", "complete")
                if excess := _excess(result):
                    error = {"code": _INVALID, "message": f"The server sent {excess}."}
                    refused = {"jsonrpc": "2.0", "id": request_id, "error": error}
                    return SessionMessage(JSONRPCError.model_validate(refused), message.metadata)
            case JSONRPCNotification(method=method) if method in _UNREAD:
                return None
            case JSONRPCRequest() | JSONRPCNotification():
                self._asked += 1
            case JSONRPCError():
                pass
        return message

    def _count(self) -> None:
        if self._clock() - self._since > PERIOD_SECONDS:
            self._since, self._asked, self._sent = self._clock(), 0, 0
        self._sent += 1
        if self._asked > MOST_ASKED or self._sent > MOST_MESSAGES:
            raise TooMuch(f"too many messages in {PERIOD_SECONDS:g} seconds")


def _excess(result: Mapping[str, Any]) -> str | None:
    for name, most in MOST_ENTRIES.items():
        entries = result.get(name)
        if isinstance(entries, list | dict) and len(entries) > most:
            return f"{len(entries)} entries of {name}, and {most} are the most"
    return None
