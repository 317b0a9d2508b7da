"""A server with a real model that is killed, and its successor, which is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import PATIENCE
from tests.support.serve_command import Command, running
from tests.support.stores import open_store

ENDLESS: Any = {"model": "tiny-gpt-oss", "input": "Never stop talking.", "temperature": 0, "background": True}


@dataclass
class Killed:
    """A background stream that was being read when its server was killed, and the successor of that server."""

    seen: list[Any]
    stored: list[Any]
    """Events that were in the store before the kill."""
    server: Command

    @property
    def response_id(self) -> str:
        response_id: str = self.seen[0].response.id
        return response_id


@pytest.fixture(scope="module")
def killed(server: Command) -> Generator[Killed, None, None]:
    """Kill the server of the earlier tests, and start its successor at the same URL."""
    seen: list[Any] = []
    stored = 0
    for event in server.client.responses.create(stream=True, **ENDLESS):
        seen.append(event)
        if not stored and len(seen) == 30:
            stored = asyncio.run(stored_events(server.store, seen[0].response.id, 30))
        if stored and event.sequence_number > stored + 20:
            break
    server.kill()
    with running(server.store, url=server.url) as successor:
        yield Killed(seen, seen[:stored], successor)


async def stored_events(path: Path, response_id: str, count: int) -> int:
    """Wait until the store has ``count`` events of a response; return how many it has."""
    async with open_store(str(path)) as store, asyncio.timeout(PATIENCE):
        while (stored := sum(block.count for block in await store.blocks(response_id))) < count:
            await asyncio.sleep(0.1)
    return stored


@pytest.mark.last(2)
@pytest.mark.defect("V2", "V3")
def test_resume_after_sigkill_gets_an_end(killed: Killed) -> None:
    events: Any = killed.server.client.responses.retrieve(killed.response_id, stream=True)
    resumed = list(events)
    assert resumed[: len(killed.stored)] == killed.stored
    assert [event.sequence_number for event in resumed] == list(range(len(resumed)))
    assert resumed[-1].type == "response.failed"
    assert resumed[-1].response.error.code == "server_error"
    text = "".join(event.delta for event in killed.stored if event.type == "response.output_text.delta")
    assert resumed[-1].response.output_text.startswith(text)
    assert killed.server.client.responses.retrieve(killed.response_id) == resumed[-1].response


@pytest.mark.last(3)
def test_sigterm_ends_running_responses(killed: Killed) -> None:
    client = killed.server.client
    background = client.responses.create(**ENDLESS)
    types = []
    for event in client.responses.create(stream=True, **{**ENDLESS, "background": False}):
        types.append(event.type)
        if event.sequence_number == 20:
            killed.server.terminate()
    assert types[-1] == "response.failed"
    assert killed.server.process.wait(PATIENCE) == 0
    assert asyncio.run(status(killed.server.store, background.id)) == "failed"


async def status(path: Path, response_id: str) -> str:
    async with open_store(str(path)) as store:
        stored = await store.get(response_id, "")
    assert stored is not None
    return stored.response.status
