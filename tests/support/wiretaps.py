"""A server that answers with bytes as a test gives them, a proxy that records it, and its recordings."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.api.dialects.named import spoken
from penstock.extensions.workbench.wiretap.proxy import Proxy, checked, proxying
from penstock.extensions.workbench.wiretap.spoken import generations
from penstock.extensions.workbench.wiretap.tap import Tap
from penstock.pipeline.recordings.format import Recording
from penstock.pipeline.recordings.wire import read_wire

FOUND = generations(spoken())

CHAT_PATH = "/v1/chat/completions"


def chunk(data: bytes) -> bytes:
    """Return bytes as a chunk of a body with ``Transfer-Encoding: chunked``."""
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass
class RawServer:
    """A server that answers each request with the same bytes, in pieces, and then ends the connection."""

    pieces: Sequence[bytes] = ()
    ends_with: Literal["close", "reset", "silence"] = "close"
    url: str = ""
    requests: list[bytes] = field(default_factory=list)
    """The head and the body of each request, as it came."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if a client has closed its connection during the silence."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            self.requests.append(head + await reader.readexactly(*length or [0]))
            for piece in self.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if self.ends_with == "silence":
                await reader.read()
                self.left.set()
            if self.ends_with == "reset":
                await asyncio.sleep(0.05)  # what was written must be read first
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


@asynccontextmanager
async def raw_server(*pieces: bytes, **options: Any) -> AsyncGenerator[RawServer, None]:
    """Serve bytes for the length of the block."""
    raw = RawServer(pieces, **options)
    server = await asyncio.start_server(raw.answer, "127.0.0.1", 0)
    async with server:
        raw.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield raw
        server.close()


@asynccontextmanager
async def recorded_server(
    upstream: str, folder: Path, *, asks_for_tokens: bool = False, **options: Any
) -> AsyncGenerator[str, None]:
    """Run a proxy that records a server for the length of the block; the recordings are complete after it."""
    tap = Tap(folder, upstream, FOUND, pause=0.01, **options)
    async with proxying(Proxy(checked(upstream), tap, asks_for_tokens), "127.0.0.1", 0) as url:
        yield url
    assert tap.noted == tap.written  # nothing is held any more


def wire_recordings(folder: Path) -> list[Recording]:
    """Return the complete recordings in a folder, in order."""
    return [read_wire(each) for each in sorted(folder.iterdir())]


def names_in(folder: Path) -> list[str]:
    """Return the names of the folders of recordings, or of the files of one."""
    return sorted(each.name for each in folder.iterdir())


def only_folder(folder: Path) -> Path:
    """Return the folder of the only recording."""
    (only,) = folder.iterdir()
    return only


async def exchange(url: str, sent: bytes) -> bytes:
    """Send bytes to a server, and return all that it answers until it closes the connection."""
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    answer: list[bytes] = []
    with suppress(ConnectionError):
        while data := await reader.read(2**20):
            answer.append(data)
    writer.close()
    return b"".join(answer)


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Return the bytes of a request that ends its connection."""
    lines = [f"POST {path} HTTP/1.1", "Host: h", "Connection: close", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
