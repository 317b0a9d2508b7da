"""Servers whose answers are no proper HTTP, as those of a broken proxy or of a hostile server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

_OK = b"HTTP/1.1 200 OK\r\n"

BROKEN: Mapping[str, bytes] = {
    "a long header": _OK + b"X: " + b"y" * 20_000 + b"\r\nContent-Length: 2\r\n\r\n{}",
    "many headers": _OK + b"".join(b"X-%d: y\r\n" % number for number in range(200)) + b"Content-Length: 2\r\n\r\n{}",
    "two lengths": _OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "plain text": b"Hello, this is no HTTP.\r\n\r\n",
    "nothing": b"",
    "half of a head": b"HTTP/1.1 200 O",
    "half of a body": _OK + b"Content-Length: 1000\r\n\r\n{",
    "a wrong coding": _OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a wrong compression": _OK + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope",
    "an unknown status": b"HTTP/1.1 999 What\r\nContent-Length: 2\r\n\r\n{}",
    "a wrong version": b"HTTP/9.9 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "a redirect to nowhere": b"HTTP/1.1 307 Found\r\nLocation: \xff\x00http://[\r\nContent-Length: 0\r\n\r\n",
    "wrong bytes": _OK + b"X: \xff\xfe\r\nContent-Length: 4\r\n\r\n\xff\xfe\xff\xfe",
    "no JSON": _OK + b"Content-Type: application/json\r\nContent-Length: 3\r\n\r\n{]}",
    "deep JSON": _OK + b"Content-Type: application/json\r\nContent-Length: 9000\r\n\r\n" + b"[" * 9000,
    "a wrong header": _OK + b"no colon\r\n: empty\r\n\r\n",
    "an answer before its end": b"HTTP/1.1 100 Continue\r\n\r\n",
    "no length": b"HTTP/1.0 500 Oops\r\n\r\nfailed",
}
"""Answers by what is wrong with them."""


def sound(body: bytes) -> bytes:
    """Return a proper answer with JSON."""
    return _OK + b"Connection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


@dataclass
class Answers:
    """A server that gives its ``answers`` to one request after another, and the last one to all that follow."""

    answers: list[bytes]
    url: str = ""
    received: bytearray = field(default_factory=bytearray)
    """All that it was sent."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a request, answer it, and close the connection."""
        with suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            self.received += head + await reader.readexactly(int(length[0].partition(b":")[2]) if length else 0)
            writer.write(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
            await writer.drain()
        writer.close()


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncGenerator[Answers, None]:
    """Run a server with these answers for the length of the block."""
    served = Answers(list(answers))
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        server.close()
