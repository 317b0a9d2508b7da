"""Frames of WebSockets byte by byte, also wrong ones, and connections to send them over."""

from __future__ import annotations

import asyncio
import base64
import os
import struct
import zlib

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
COMPRESSED = 4
"""The reserved bit of a compressed message."""

NO_MASK = b""
"""A server closes the connection of a client that sends a frame without a mask."""


def frame_of(
    payload: bytes = b"", opcode: int = TEXT, *, fin: bool = True, mask: bytes = bytes(4), reserved: int = 0
) -> bytes:
    size = len(payload)
    if size < 126:
        length, extended = size, b""
    else:
        length, extended = (126, struct.pack(">H", size)) if size < 2**16 else (127, struct.pack(">Q", size))
    head = bytes([fin << 7 | reserved << 4 | opcode, (0x80 if mask else 0) | length]) + extended + mask
    key = int.from_bytes((mask * (size // 4 + 1))[:size], "little")
    return head + (int.from_bytes(payload, "little") ^ key).to_bytes(size, "little")


def deflated(payload: bytes) -> bytes:
    """The payload of a compressed message."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    return (deflate.compress(payload) + deflate.flush(zlib.Z_SYNC_FLUSH)).removesuffix(b"\0\0\xff\xff")


async def upgraded(url: str, **headers: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection; ``headers`` are those of WebSockets, without their common beginning."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    key = base64.b64encode(os.urandom(16)).decode()
    head = "GET /v1/responses HTTP/1.1\r\nHost: {}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    head += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {}\r\n"
    head += "".join(f"Sec-WebSocket-{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
    writer.write(head.format(host, key).encode())
    assert b"101 Switching Protocols" in await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the opcode and the payload of the next frame of a server."""
    first, length = await reader.readexactly(2)
    if length > 125:
        length = int.from_bytes(await reader.readexactly(2 if length == 126 else 8), "big")
    return first & 0x0F, await reader.readexactly(length)
