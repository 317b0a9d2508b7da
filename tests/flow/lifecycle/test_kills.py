from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_clients import StreamReader
from tests.support.event_streams import final, read_sse
from tests.support.server_process import running_process
from tests.support.stored_responses import expire_heartbeat
from tests.support.stores import open_store, wait_until_stored

Events = list[dict[str, Any]]


def stream_of(response_id: str) -> str:
    return f"/v1/responses/{response_id}?stream=true"


def events_of(stream: bytes) -> Events:
    lines = (line for line in stream.split(b"\n") if line.startswith(b"data: {"))
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def deltas(events: Events) -> Events:
    return [event for event in events if event["type"].endswith(".delta")]


def assert_ends_once(seen: Events, stored: Events) -> None:
    """Assert that a reader saw all stored events, perhaps later ones of the killed server, and then exactly one end."""
    numbers = [event["sequence_number"] for event in seen]
    assert numbers == sorted(set(numbers))
    assert seen[-1] == stored[-1] | {"sequence_number": numbers[-1]}
    assert [event["type"] for event in seen].count("response.failed") == 1
    assert deltas(seen)[: len(deltas(stored))] == deltas(stored)


@pytest.mark.defect("18", "V2", "V3")
async def test_response_of_a_killed_server_ends_at_another(store_at: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        servers = (running_process(store_at, tmp_path, text, "--max-background", "1") for text in ("long", "quick"))
        one, other = await asyncio.gather(*map(stack.enter_async_context, servers))  # over a new store
        running, waiting = await one.start_background(), await one.start_background()
        made_there = asyncio.create_task(other.again(stream_of(waiting)))
        async with other.client.get(other.url + stream_of(running)) as answer:
            reader = StreamReader(answer)
            await reader.upto(b'"delta":"20"')
            await wait_until_stored(store_at, running, len(events_of(reader.read)))
            await one.kill()
            async with open_store(store_at) as store:
                await expire_heartbeat(store, one.url)
            seen = events_of(await reader.rest())
        stored = await other.again(stream_of(running))
        assert final(read_sse(stored)).status == "failed"
        assert_ends_once(seen, events_of(stored))
        assert "20" in (await other.wait_for_end(running))["output"][-1]["content"][0]["text"]
        assert final(read_sse(await made_there)).status == "completed"
