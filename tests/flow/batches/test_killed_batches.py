"""The kill drill of batches: servers that are killed again and again lose no line, and answer none twice."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.server_process import ServerProcess, running_process
from tests.support.stores import both_if_thorough, database_at

LINES = 2_000
KILLS = 6


def input_file(number: int) -> bytes:
    lines = (
        {
            "custom_id": f"line {each}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "scripted", "messages": [{"role": "user", "content": f"Say {each}."}]},
        }
        for each in range(number)
    )
    return "\n".join(map(json.dumps, lines)).encode()


async def upload(server: ServerProcess, content: bytes) -> str:
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", content, filename="requests.jsonl")
    async with server.client.post(f"{server.url}/v1/files", data=form) as answer:
        return str((await answer.json())["id"])


async def lines_of(server: ServerProcess, file_id: str) -> list[dict[str, Any]]:
    async with server.client.get(f"{server.url}/v1/files/{file_id}/content") as answer:
        return list(map(json.loads, (await answer.text()).splitlines()))


async def count(store_at: str, sql: str) -> int:
    database = database_at(store_at)
    await database.open()
    try:
        ((number,),) = await database.read(sql)
    finally:
        await database.close()
    return int(number)


async def kill_often(server: ServerProcess, store_at: str) -> None:
    """Kill the server whenever it has answered some lines more."""
    done = "select count(*) from batch_lines where kind is not null"
    for kill in range(KILLS):
        while await count(store_at, done) < LINES * (kill + 0.5) / (KILLS + 1):
            await asyncio.sleep(0.05)
        await asyncio.sleep(random.uniform(0.0, 0.1))
        await server.kill()
        await server.start()


@both_if_thorough
async def test_killed_server_loses_and_doubles_no_line(store_at: str, tmp_path: Path) -> None:
    async with running_process(store_at, tmp_path, "brisk") as server:
        file_id = await upload(server, input_file(LINES))
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        status, batch = await server.post(body, "/v1/batches")
        assert (status, batch["status"]) == (200, "validating")
        await kill_often(server, store_at)
        async with asyncio.timeout(300):
            while batch["status"] != "completed":
                await asyncio.sleep(0.1)
                _, batch = await server.get(f"/v1/batches/{batch['id']}")
        assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        answered = Counter(line["custom_id"] for line in await lines_of(server, batch["output_file_id"]))
        assert answered == Counter(f"line {each}" for each in range(LINES))
        _, files = await server.get("/v1/files?purpose=batch_output")
        assert [file["id"] for file in files["data"]] == [batch["output_file_id"]]
        noted = "select (select count(*) from ledger) + (select coalesce(sum(requests), 0) from ledger_hours)"
        assert await count(store_at, noted) == LINES
