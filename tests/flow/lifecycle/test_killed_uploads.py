"""A server that is killed in the middle of an upload: its next start, or another server, deletes what has arrived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import aiohttp

from penstock.extensions.tools.files.stored_files import CHUNK
from penstock.services.store.store import Store
from tests.support.server_process import ServerProcess, running_process
from tests.support.stores import open_store


async def upload(server: ServerProcess, content: AsyncIterator[bytes] | bytes) -> int:
    form = aiohttp.FormData()
    form.add_field("purpose", "user_data")
    form.add_field("file", content, filename="a.bin")
    async with server.client.post(f"{server.url}/v1/files", data=form) as answer:
        return answer.status


async def unfinished(ended: asyncio.Event) -> AsyncIterator[bytes]:
    yield bytes(4 * CHUNK + CHUNK // 2)  # the reader of forms holds the last bytes back
    await ended.wait()


async def rows(store: Store) -> list[int]:
    return [(await store.context.read(f"select count(*) from {name}"))[0][0] for name in ("files", "file_chunks")]


async def wait_for_rows(store: Store, files: int, chunks: int) -> None:
    async with asyncio.timeout(120):
        while await rows(store) != [files, chunks]:
            await asyncio.sleep(0.05)


async def test_killed_upload_leaves_nothing(store_at: str, tmp_path: Path) -> None:
    async with running_process(store_at, tmp_path) as server, open_store(store_at) as store:
        assert await upload(server, b"whole") == 200
        ended = asyncio.Event()
        uploading = asyncio.create_task(upload(server, unfinished(ended)))
        await wait_for_rows(store, 2, 5)
        await server.kill()
        ended.set()
        with suppress(aiohttp.ClientError):
            await uploading
        await wait_for_rows(store, 2, 5)
        await server.start()
        await wait_for_rows(store, 1, 1)
        status, page = await server.get("/v1/files")
        assert (status, [file["bytes"] for file in page["data"]]) == (200, [5])
