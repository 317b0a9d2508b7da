"""Flood a server process with bodies that do not end, beside an ordinary client that must go on; tell its memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.bench.fuzz.fire import HANGS, Outcome, complaints
from tests.support.api_clients import ApiClient
from tests.support.server_process import ServerProcess

BODY_BYTES = 1_040_000
"""Bytes of a body that does not end, just below what counts as large."""

PIECE_BYTES = 2**16

ORDINARY: Mapping[str, Any] = {"input": "Hi"}

_HEAD = (
    b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % (BODY_BYTES + 1_000)
)


async def flood(server: ServerProcess, count: int, seconds: float) -> dict[str, Outcome]:
    """Send bodies that do not end for some seconds, then none for as long; the name of their outcome has the memory."""
    before = resident_megabytes(server)
    async with ordinary_client(server) as ordinary:
        unfinished = Outcome()
        statuses = await asyncio.gather(*(_leave_unfinished(server, seconds) for _ in range(count)))
        unfinished.statuses.update(statuses)
        if "broken off" in unfinished.statuses:
            unfinished.fault("connections were broken off", unfinished.statuses["broken off"])
    peak = resident_megabytes(server, "VmHWM")
    await asyncio.sleep(seconds)
    after = resident_megabytes(server)
    return {
        f"{count} bodies that do not end (memory {before} MB before, {peak} at the peak, {after} later)": unfinished,
        "an ordinary client beside them": ordinary,
        "after the bodies": Outcome(faults=complaints(server)),
    }


async def _leave_unfinished(server: ServerProcess, seconds: float) -> str:
    """Send a body but for its end; return the status of the answer that comes all the same."""
    url = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        writer.write(_HEAD)
        for start in range(0, BODY_BYTES, PIECE_BYTES):
            writer.write(b" " * min(PIECE_BYTES, BODY_BYTES - start))
            await writer.drain()
        async with asyncio.timeout(seconds):
            return (await reader.readline()).split()[1].decode()
    except TimeoutError:
        return "open until the client left"
    except (ConnectionError, IndexError):
        return "broken off"
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def ordinary_client(server: ApiClient, body: Mapping[str, Any] = ORDINARY) -> AsyncGenerator[Outcome, None]:
    """Send requests for the length of the block, each again while the server is busy, as SDKs do."""
    outcome, is_over = Outcome(), asyncio.Event()

    async def go_on() -> None:
        while not is_over.is_set():
            try:
                async with asyncio.timeout(HANGS):
                    while (status := (await server.post(body))[0]) == 503:
                        outcome.statuses["503"] += 1
                        await asyncio.sleep(1)
            except TimeoutError:
                outcome.fault(f"no answer for {HANGS:g} seconds", "Hi")
                continue
            outcome.statuses[str(status)] += 1
            if status != 200:
                outcome.fault("a wrong answer", status)
            await asyncio.sleep(0.1)

    going = asyncio.create_task(go_on())
    try:
        yield outcome
    finally:
        is_over.set()
        await going


def resident_megabytes(server: ServerProcess, field: str = "VmRSS") -> int:
    """Return the memory of a server process, or with ``VmHWM`` the most that it has had."""
    status = Path(f"/proc/{server.pid}/status").read_text(encoding="ascii")
    return int(status.partition(f"{field}:")[2].split()[0]) // 1024
