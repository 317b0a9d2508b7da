"""A server that is killed while it reads the input of a batch: its next start reads it again, and no line is lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.support.api_clients import openai_client
from tests.support.server_process import running_process
from tests.support.stores import both_if_thorough, open_store

LINES = 20_000


@both_if_thorough
async def test_input_is_read_again(store_at: str, tmp_path: Path) -> None:
    body = {"input": "Hi", "metadata": {"long": "x" * 400}}
    line = {"method": "POST", "url": "/v1/responses", "body": body}
    content = "\n".join(json.dumps({"custom_id": str(number), **line}) for number in range(LINES)).encode()
    async with running_process(store_at, tmp_path) as server, open_store(store_at) as store:
        async with openai_client(server.url) as sdk:
            file = await sdk.files.create(file=("lines.jsonl", content), purpose="batch")
            batch = await sdk.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
            async with asyncio.timeout(120):
                while not await store.context.read("select 1 from batch_lines limit 1"):
                    await asyncio.sleep(0.001)
        await server.kill()
        ((added,),) = await store.context.read("select count(*) from batch_lines")
        assert 0 < added < LINES
        await server.start()
        async with openai_client(server.url) as sdk, asyncio.timeout(240):
            while (now := await sdk.batches.retrieve(batch.id)).status == "validating":
                await asyncio.sleep(0.05)
            assert (now.status, now.request_counts and now.request_counts.total) == ("in_progress", LINES)
            await sdk.batches.cancel(batch.id)
            while (now := await sdk.batches.retrieve(batch.id)).status != "cancelled":
                await asyncio.sleep(0.05)
            names = [now.output_file_id, now.error_file_id]
            texts = [(await sdk.files.content(name)).text for name in names if name]
        found = sorted(int(json.loads(text)["custom_id"]) for text in "".join(texts).splitlines())
        assert found == list(range(LINES))
