"""Pictures for tests: PNGs of one colour."""

from __future__ import annotations

import base64
import struct
import zlib

RED, BLUE = (255, 0, 0), (0, 0, 255)


def png(colour: tuple[int, int, int] = RED, width: int = 8, height: int = 8) -> bytes:
    """A PNG of one colour."""
    rows = (b"\0" + bytes(colour) * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def data_url(image: bytes, kind: str = "image/png") -> str:
    """An image as clients write it."""
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"


IMAGES = {
    "image/png": png(),
    "image/jpeg": b"\xff\xd8\xff\xe0\0\x10JFIF",
    "image/webp": b"RIFF\x24\0\0\0WEBPVP8 ",
    "image/gif": b"GIF89a\1\0\1\0",
}
"""The beginnings of images, by their types; the first is whole."""
