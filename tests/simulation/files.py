"""Clients of the Files API: they upload files, have the model read them, and delete them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import aiohttp

from tests.simulation.clients import BUSY, HASTY, MODES, PAUSE, Client, Json
from tests.simulation.engine import count_file
from tests.simulation.ledger import KnownFile, Violation
from tests.simulation.scripts import Script

LARGE = 700_000
"""Bytes of a large file: the store keeps it in two chunks."""


async def file(client: Client) -> None:
    """Upload a file, have the model read it, reach for those of others, and perhaps delete it."""
    last = client.draw.choice((1, 3, 12))
    is_large = client.draw.random() < 0.2
    if (known := await uploaded(client, b"x" * LARGE if is_large else count_file(last))) is None:
        return
    if not is_large:
        for _ in range(client.draw.randint(0, 2)):
            await _have_it_read(client, known, last)
    for other in [each for each in client.world.ledger.files.values() if each.owner != client.owner]:
        await client.refused_all(*((method, f"/v1/files/{other.id}") for method in ("GET", "DELETE")))
    if client.draw.random() < 0.4:
        await _delete(client, known)


async def uploaded(client: Client, data: bytes, purpose: str = "user_data") -> KnownFile | None:
    """Upload a file until a server has taken it; return None if the client does not know that, or leaves."""
    with suppress(TimeoutError):
        async with asyncio.timeout(client.draw.uniform(0.0, 0.03) if client.draw.random() < HASTY else None):
            return await _uploaded(client, data, purpose)
    return None


async def _uploaded(client: Client, data: bytes, purpose: str) -> KnownFile | None:
    while True:
        form = aiohttp.FormData({"purpose": purpose})
        form.add_field("file", data, filename="count.txt", content_type="text/plain")
        try:
            async with client.asked("POST", "/v1/files", data=form) as answer:
                whole: Json = await answer.json()
        except aiohttp.ClientError:
            return None
        if answer.status == 200:
            known = KnownFile(whole["id"], client.owner, data)
            client.world.ledger.files[known.id] = known
            client.world.saw("answer", answer.url.host)
            return known
        if answer.status not in BUSY:
            raise Violation(f"an upload was answered with {answer.status} {whole}")
        await asyncio.sleep(PAUSE * 4)


async def _have_it_read(client: Client, known: KnownFile, last: int) -> None:
    mode = client.draw.choice(MODES)
    parts = [{"type": "input_file", "file_id": known.id}, {"type": "input_text", "text": "Count."}]
    body = client.body(mode, input=[{"role": "user", "content": parts}])
    body["metadata"] |= {"file": known.id, "last": str(last)}
    await client.create(body, mode, client.draw.choice((-1, -1, 5)))


async def _delete(client: Client, known: KnownFile) -> None:
    known.deleting = True
    status, answer = await client.insist("DELETE", f"/v1/files/{known.id}")
    if status not in (200, 404):
        raise Violation(f"deleting {known.id} was answered with {status} {answer}")
    known.deleted = status == 200


async def content_of(client: Client, url: str) -> bytes | None:
    """Return the content of a file at the URL of a server; None if there is none."""
    async with client.http.get(url) as answer:
        client.check_status(answer.status, url)
        return await answer.read() if answer.status == 200 else None


SCRIPTS: Mapping[str, Script] = {"file": file}
