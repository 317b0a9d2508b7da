"""What an MCP server sends, counted before it is converted.

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

LARGEST_BYTES: Final = 16 * 2**20
"""Bytes of a message: the body of an answer, or one event of a stream."""

MOST_CONTAINERS: Final = 15_000
"""Objects and arrays in a message.  The SDK parses 700 of them in a millisecond."""

MOST_COMMAS: Final = 500_000
"""Commas in a message, those in texts included.  They bound the plain values of its arrays."""

MOST_ENTRIES: Final[Mapping[str, int]] = {"content": 1_000, "tools": 2_000, "inputRequests": 100}
"""Entries of the lists in a result, each of which the SDK makes an object of."""

MOST_ASKED: Final = 200
"""Requests and notifications of a server in `PERIOD_SECONDS`, each of which takes a task of the SDK.

Notifications of progress and of the log do not count: they are left out, as penstock does not read them.
"""

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
    """A body that raises `TooMuch` as soon as one of its messages exceeds the limits."""

    def __init__(self, inner: httpx2.AsyncByteStream, *, is_stream: bool) -> None:
        self._inner = inner
        self._is_stream = is_stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        count, ends = _Count(), _Ends() if self._is_stream else None
        async for chunk in self._inner:
            first, *others = ends.parts(chunk) if ends else (chunk,)
            count.add(first)
            for part in others:
                count = _Count()
                count.add(part)
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Ends:
    """Finds the ends of events: an empty line, whichever way lines end."""

    def __init__(self) -> None:
        self._tail = b""  # the ends of lines at the end of the last chunk

    def parts(self, chunk: bytes) -> list[bytes]:
        """Return the parts of a chunk that belong to different events; the first goes on with the last one before."""
        text = self._tail + chunk
        self._tail = text[len(text.rstrip(b"\r\n")) :][-3:]
        return text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n")


class _Count:
    """The size of one message so far."""

    def __init__(self) -> None:
        self._bytes = self._containers = self._commas = 0

    def add(self, part: bytes) -> None:
        """Count a part of the message; raise `TooMuch` beyond the limits."""
        self._bytes += len(part)
        self._containers += containers(part)
        self._commas += part.count(b",")
        if self._bytes > LARGEST_BYTES:
            raise TooMuch(f"more than {LARGEST_BYTES} bytes")
        if self._containers > MOST_CONTAINERS:
            raise TooMuch(f"more than {MOST_CONTAINERS} objects and arrays")
        if self._commas > MOST_COMMAS:
            raise TooMuch(f"more than {MOST_COMMAS} values")


def containers(json: bytes) -> int:
    r"""Return a bound for the number of objects and arrays in JSON, without parsing it.

    A brace before a backslash stands in a text, as those of JSON and code do that a text quotes (``{\"``, ``{\n``).
    """
    return sum(json.count(mark) - json.count(mark + b"\\") for mark in (b"{", b"["))


class Messages:
    """Decides about each message of a connection, before the SDK makes objects of its parts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._asked = 0

    def admitted(self, message: Any) -> Any:
        """Return the message that the SDK may have, None if it is to be left out; raise `TooMuch` for a flood."""
        if not isinstance(message, SessionMessage):
            return message
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
                self._count()
            case JSONRPCError():
                pass
        return message

    def _count(self) -> None:
        if self._clock() - self._since > PERIOD_SECONDS:
            self._since, self._asked = self._clock(), 0
        self._asked += 1
        if self._asked > MOST_ASKED:
            raise TooMuch(f"more than {MOST_ASKED} requests of the server in {PERIOD_SECONDS:g} seconds")


def _excess(result: Mapping[str, Any]) -> str | None:
    for name, most in MOST_ENTRIES.items():
        entries = result.get(name)
        if isinstance(entries, list | dict) and len(entries) > most:
            return f"{len(entries)} entries of {name}, and {most} are the most"
    return None
