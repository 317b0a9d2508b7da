"""The kill drill of batches: servers that are killed again and again lose no line, and answer none twice."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.server_process import ServerProcess, running_process
from tests.support.stores import both_if_thorough, database_at

LINES = 2_000
KILLS = 6
STANDING_LINES = 800


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


async def finished(server: ServerProcess, batch: dict[str, Any], store_at: str, number: int) -> None:
    """Wait for the end of a batch, each of whose lines has one answer, one line of the one file, and one use."""
    async with asyncio.timeout(300):
        while batch["status"] != "completed":
            await asyncio.sleep(0.1)
            _, batch = await server.get(f"/v1/batches/{batch['id']}")
    assert batch["request_counts"] == {"total": number, "completed": number, "failed": 0}
    answered = Counter(line["custom_id"] for line in await lines_of(server, batch["output_file_id"]))
    assert answered == Counter(f"line {each}" for each in range(number))
    _, files = await server.get("/v1/files?purpose=batch_output")
    assert [file["id"] for file in files["data"]] == [batch["output_file_id"]]
    noted = "select (select count(*) from ledger) + (select coalesce(sum(requests), 0) from ledger_hours)"
    assert await count(store_at, noted) == number


async def created(server: ServerProcess, number: int) -> dict[str, Any]:
    file_id = await upload(server, input_file(number))
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    status, batch = await server.post(body, "/v1/batches")
    assert (status, batch["status"]) == (200, "validating")
    return dict(batch)


@both_if_thorough
async def test_killed_server_loses_and_doubles_no_line(store_at: str, tmp_path: Path) -> None:
    async with running_process(store_at, tmp_path, "brisk") as server:
        batch = await created(server, LINES)
        await kill_often(server, store_at)
        await finished(server, batch, store_at, LINES)


@both_if_thorough
async def test_server_that_stands_still_doubles_no_line(store_at: str, tmp_path: Path) -> None:
    """It seems dead, loses its lines to the other server, and comes back with their answers."""
    stale = ("--stale-after", "1")
    async with (
        running_process(store_at, tmp_path, "brisk", *stale) as one,
        running_process(store_at, tmp_path, "brisk", *stale) as other,
    ):
        batch = await created(one, STANDING_LINES)
        done = "select count(*) from batch_lines where kind is not null"
        for share in (0.2, 0.5):
            while await count(store_at, done) < STANDING_LINES * share:
                await asyncio.sleep(0.05)
            os.kill(one.pid, signal.SIGSTOP)
            before = await count(store_at, done)
            while await count(store_at, done) < min(before + 20, STANDING_LINES):
                await asyncio.sleep(0.05)
            while not await count(store_at, "select count(*) from batch_lines where attempts > 9"):
                await asyncio.sleep(0.05)  # until the other server has taken its lines
            os.kill(one.pid, signal.SIGCONT)
        await finished(other, batch, store_at, STANDING_LINES)
