"""The bytes that the cheapest possible clients send: requests over HTTP, and frames over a WebSocket (RFC 6455)."""

from __future__ import annotations

import socket

RESPONSES = "/v1/responses"

END = b"0\r\n\r\n"
"""The last chunk of a complete chunked body (RFC 9112)."""

CLOSE = b"\x88\x82" + bytes(4) + b"\x03\xe8"
"""A frame that closes a socket, with the code 1000."""

COMPLETED = b'"type":"response.completed"'

_UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def connected(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def upgraded(port: int) -> socket.socket:
    """Connect, and return the connection once it is a WebSocket; raise `SystemExit` if it is refused."""
    client, answer = connected(port), b""
    client.sendall(_UPGRADE)
    while not answer.endswith(b"\r\n\r\n") and (byte := client.recv(1)):  # frames of the server may follow at once
        answer += byte
    if not answer.startswith(b"HTTP/1.1 101 "):
        raise SystemExit(f"Refused: {answer[:300]!r}")
    return client


def posted(body: bytes, connection: str, path: str = RESPONSES) -> bytes:
    """Return a request with the value of its ``Connection`` header."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: {connection}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def framed(text: bytes) -> bytes:
    """Return a text frame, masked by zeros."""
    size = len(text)
    if size < 126:
        length = bytes((size | 0x80,))
    elif size < 2**16:
        length = b"\xfe" + size.to_bytes(2)
    else:
        length = b"\xff" + size.to_bytes(8)
    return b"\x81" + length + bytes(4) + text


def unframed(data: bytes) -> tuple[bytes, bytes] | None:
    """Return the text of the first frame of a server, and what follows it; None if the frame is not complete."""
    if len(data) < 2:
        return None
    extended = {126: 2, 127: 8}.get(data[1], 0)
    begin = 2 + extended
    size = int.from_bytes(data[2:begin]) if extended else data[1]
    end = begin + size
    return (data[begin:end], data[end:]) if len(data) >= end else None
