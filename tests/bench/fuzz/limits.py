"""Have a limited key send hostile requests, beside an ordinary key: each of them counts, whatever becomes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from tests.bench.fuzz.fire import HANGS, Outcome, complaints, fire_bodies
from tests.bench.fuzz.floods import ordinary_client
from tests.bench.fuzz.hostile import drawn, hostile_requests
from tests.support.api_clients import ApiClient
from tests.support.openapi import Description
from tests.support.server_process import ServerProcess, running_process

GREEDY, ORDINARY = "sk-greedy-0123456789", "sk-ordinary-0123456789"

PER_MINUTE = 60
"""Requests of the greedy key."""

UNCOUNTED = ("401", "403", "404", "405", "417", "429")
"""Statuses of requests that are refused before they count, or for their limit."""

DECLARED_BYTES = 30_000_000


@asynccontextmanager
async def limited_process(folder: Path) -> AsyncGenerator[ServerProcess, None]:
    """Run a server with two keys, of which one is limited."""
    keys, limits = folder / "keys", folder / "limits.toml"
    keys.write_text(f"{GREEDY} name=greedy limits=greedy\n{ORDINARY} name=ordinary\n")
    keys.chmod(0o600)
    limits.write_text(f"[greedy]\nrequests_per_minute = {PER_MINUTE}\n")
    options = ("--api-key-file", str(keys), "--limits", str(limits))
    async with running_process(str(folder / "limits.sqlite3"), folder, "quick", *options) as server:
        yield server


async def exceed_limits(server: ServerProcess, count: int, seed: int) -> dict[str, Outcome]:
    """Send requests, and then declare bodies that never come; the ordinary key must notice nothing."""
    requests = drawn(hostile_requests(Description((await server.get("/openapi.json"))[1]), ()), count, seed)
    async with (
        keyed_client(server, GREEDY) as greedy,
        keyed_client(server, ORDINARY) as other,
        ordinary_client(other) as ordinary,
    ):
        since = time.monotonic()
        bodies = await fire_bodies(greedy, requests)
        admitted = sum(number for status, number in bodies.statuses.items() if status not in UNCOUNTED)
        declared = await _declare_much(server, count, since, admitted)
    return {
        "bodies of a limited key": bodies,
        "declared bodies of a limited key": declared,
        "an ordinary key": ordinary,
        "after the limits": Outcome(faults=complaints(server)),
    }


@asynccontextmanager
async def keyed_client(server: ServerProcess, key: str) -> AsyncGenerator[ApiClient, None]:
    """Yield a client with a key."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
        yield ApiClient(server.url, session)


async def _declare_much(server: ServerProcess, count: int, since: float, admitted: int) -> Outcome:
    """Send only the headers of large bodies; all that the key may not send must be answered."""
    outcome = Outcome()
    waiting = {asyncio.create_task(_declare(server)) for _ in range(count)}
    while len(waiting) + admitted > PER_MINUTE * (1 + (time.monotonic() - since) / 60) + 1:
        answered, waiting = await asyncio.wait(waiting, timeout=HANGS, return_when=asyncio.FIRST_COMPLETED)
        if not answered:
            outcome.fault(
                f"more than {PER_MINUTE} a minute were admitted", f"{admitted} and {len(waiting)} declared ones"
            )
            break
        outcome.statuses.update(task.result() for task in answered)
    outcome.statuses["waits for its body"] = len(waiting)
    for task in waiting:
        task.cancel()
    if outcome.statuses.keys() - {"429", "waits for its body"}:
        outcome.fault("a declared body was answered", outcome.statuses)
    return outcome


async def _declare(server: ServerProcess) -> str:
    """Declare a large body, and return the status of the answer that comes without it."""
    url = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {GREEDY}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {DECLARED_BYTES}\r\n\r\n".encode())
    try:
        return (await reader.readline()).decode().partition(" ")[2][:3] or "broken off"
    finally:
        writer.close()
