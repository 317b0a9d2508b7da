"""Pictures for tests: PNGs of one colour."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib

from aiohttp import web

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


class Gallery:
    """A server of pictures, which counts who looks; ``/to`` leads to another URL."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.waiting = asyncio.Event()

    async def show(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request.path)
        match request.path:
            case "/to":
                raise web.HTTPFound(request.query["url"])
            case "/page":
                return web.Response(text="<html>secret</html>", content_type="image/png")
            case "/slow":
                self.waiting.set()
                await asyncio.Event().wait()
                raise AssertionError
            case "/gone":
                return web.Response(status=404, body=png())
            case "/blue":
                return web.Response(body=png(BLUE), content_type="application/octet-stream")
            case path if path[1:] in ("jpeg", "webp", "gif"):
                return web.Response(body=IMAGES[f"image{path}"], content_type=f"image{path}")
            case _:
                return web.Response(body=png(), content_type="image/png")
