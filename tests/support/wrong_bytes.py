"""Requests with wrong bytes in any part: in the URL, in headers, in the body, and in the frames of a WebSocket.

No client library sends them, so they are written byte by byte.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.support.openapi import Description
from tests.support.request_bodies import CLIENTS, EVERYTHING

WRONG = (
    *(b"\xff", b"\xd7s", b"\xed\xa0\x80", b"\xc0\xaf", b"\xe2\x80\xa8", b"\x00", b"\x1b[31m", b"\x7f"),
    *(b"%ff", b"%00", b"%ED%A0%80", b"%", b"%0d%0a", b"\\ud800", b"\\udfff\\ud800", b"\\u0000", b"\\", b'"'),
    *(b"9" * 400, b"1e999", b"-", b"NaN", b"{", b"]" * 99, b"[" * 9_000, b"\xef\xbb\xbf", "é".encode("utf-16")),
)
"""Bytes that are no UTF-8, no JSON, no number or no visible text."""

SOCKET = (
    *((b"Upgrade", b"websocket"), (b"Connection", b"Upgrade"), (b"Sec-WebSocket-Version", b"13")),
    *((b"Sec-WebSocket-Key", b"dGhlIHNhbXBsZSBub25jZQ=="), (b"Sec-WebSocket-Protocol", b"a, b")),
    (b"Sec-WebSocket-Extensions", b"permessage-deflate; client_max_window_bits"),
)
"""The headers that open a WebSocket."""

HEADERS = (
    *((b"Authorization", b"Bearer x"), (b"X-Request-Id", b"a-1"), (b"Cookie", b"a=b; c=d"), (b"Accept", b"text/html")),
    (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    *((b"tracestate", b"vendor=1"), (b"Content-Encoding", b"identity"), (b"Expect", b"100-continue")),
    *((b"Origin", b"http://localhost"), (b"Access-Control-Request-Headers", b"x-a"), (b"Sec-Fetch-Site", b"none")),
    *((b"Sec-Fetch-Mode", b"navigate"), (b"X-Penstock-Forwarded", b"1"), (b"X-Forwarded-For", b"192.0.2.1")),
    *(
        (b"If-None-Match", b'"a"'),
        (b"Range", b"bytes=0-1"),
        (b"User-Agent", b"a/1.0"),
        (b"Content-Type", b"text/plain"),
    ),
    *((b"Forwarded", b"for=192.0.2.1"), (b"X-Penstock-Record", b"1"), (b"X-Session-ID", b"a")),
)
"""Headers that a server may read."""

BODIES: Sequence[Any] = (
    *({"input": "Hi", "model": "tiny"}, {"model": "tiny", "input": "Hi", "stream": True}),
    {"input": "Hi", "background": True, "metadata": {"a": "b"}, "request_id": "a-1"},
    {"prompt": ["Hi", "Ho"], "echo": True, "logprobs": 1, "n": 2},
    {"items": [{"role": "user", "id": "msg_1", "content": "Hi"}], "metadata": {"a": "b"}},
    *CLIENTS.values(),
    EVERYTHING,
)

EVENTS: Sequence[Any] = (
    {"type": "response.create", "model": "tiny", "input": "Hi", "stream_id": "a", "generate": False},
    {"type": "response.create", "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]},
    {"type": "response.steer", "previous_response_id": "resp_1", "input": "Hi"},
    {"type": "response.steer", "previous_response_id": "resp_1", "input": [{"role": "user", "content": "Hi"}]},
)
"""Events of a client, each of which is answered."""


@dataclass(frozen=True)
class RawRequest:
    """A request that closes its connection, or opens a WebSocket."""

    method: bytes
    url: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes | None = None

    @property
    def wire(self) -> bytes:
        headers = dict(self.headers)
        if self.body is not None:
            headers = {b"Content-Type": b"application/json", **headers, b"Content-Length": b"%d" % len(self.body)}
        lines = [
            b"%b: %b\r\n" % header for header in {b"Host": b"localhost", b"Connection": b"close", **headers}.items()
        ]
        return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (self.method, self.url, b"".join(lines), self.body or b"")


@st.composite
def spoilt(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Draw bytes with wrong ones inside, in place of some or between them."""
    sent = draw(whole)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(sent)))
        sent = sent[:at] + draw(st.sampled_from(WRONG)) + sent[at + draw(st.integers(0, 3)) :]
    return sent


@dataclass(frozen=True)
class Route:
    """A route, with the names of its query parameters."""

    method: str
    path: str
    query: tuple[str, ...]


def routes(description: Description) -> list[Route]:
    return [
        Route(method, path, tuple(each["name"] for each in operation["parameters"] if each["in"] == "query"))
        for method, path, operation in description.operations
    ]


@st.composite
def wrong_requests(draw: st.DrawFn, known: Sequence[Route], ids: Sequence[str]) -> RawRequest:
    """Draw requests in which the URL, headers or the body have wrong bytes; ``ids`` are those of stored objects."""
    route, names = draw(st.sampled_from(known)), st.sampled_from([each.encode() for each in ids])
    url = re.sub(rb"{\w+}", lambda _: draw(names | spoilt(names)), route.path.encode())
    has_query: bool = draw(st.booleans())
    if route.query and has_query:
        name = draw(st.sampled_from(route.query)).encode()
        url += b"?stream=true&" + draw(spoilt(st.just(b"%b=1" % name)))
    headers = [draw(_maybe_spoilt(header)) for header in draw(st.lists(st.sampled_from(HEADERS), max_size=4))]
    if route.path.endswith("/responses") and draw(st.integers(0, 3)) == 0:
        opening = (*headers, *(draw(_maybe_spoilt(header, 1)) for header in SOCKET))
        return RawRequest(b"GET", url, opening)
    body = None
    if route.method == "POST":
        bodies = st.sampled_from(BODIES).map(lambda each: json.dumps(each).encode())
        body = draw(bodies | spoilt(bodies) | spoilt(bodies))
    return RawRequest(route.method.encode(), url.replace(b" ", b"+"), tuple(headers), body)


def _maybe_spoilt(header: tuple[bytes, bytes], of_five: int = 3) -> st.SearchStrategy[tuple[bytes, bytes]]:
    name, value = header
    values = st.integers(1, 5).flatmap(lambda drawn: spoilt(st.just(value)) if drawn <= of_five else st.just(value))
    return values.map(lambda value: (name, value))


def wrong_frames() -> st.SearchStrategy[bytes]:
    """Draw the text frames of events with wrong bytes."""
    return spoilt(st.sampled_from(EVENTS).map(lambda event: json.dumps(event).encode()))


async def answer_to(url: str, request: RawRequest) -> tuple[int, bytes]:
    """Send a request; return status and body of its answer.  A WebSocket is left at once."""
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    try:
        writer.write(request.wire)
        status, head = 100, b""
        while status == 100:
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split()[1])
        if length := re.search(rb"^content-length: (\d+)\r$", head, re.IGNORECASE | re.MULTILINE):
            return status, await reader.readexactly(int(length[1]))
        return status, b"" if status == 101 else await reader.readuntil(b"0\r\n\r\n")
    finally:
        writer.close()
