"""The lives of responses, as their clients see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from stages.generate.scripted import ScriptedEngine
from tests.support.event_streams import read_sse
from tests.support.scripts import Scripted
from tests.support.server import Asked, Served

Json = dict[str, Any]

PATIENCE = 120.0
"""Seconds in which what must come has come, on a machine that is busy, or that stands still for a minute."""


async def begun(served: Asked, body: dict[str, Any] | None = None) -> str:
    """The id of a response in the background, which waits as soon as it is asked for."""
    status, answer = await served.post({"input": "Hi", "background": True, **(body or {})})
    assert (status, answer["status"], answer["background"], answer["output"]) == (200, "queued", True, [])
    return str(answer["id"])


async def ended(served: Asked, response_id: str) -> dict[str, Any]:
    """A response, once it is over."""
    async with asyncio.timeout(PATIENCE):
        while True:
            answer = await found(served, response_id)
            if answer["status"] not in ("queued", "in_progress"):
                return answer
            await asyncio.sleep(0.01)


async def found(served: Asked, response_id: str) -> dict[str, Any]:
    """A response as it stands."""
    status, answer = await served.get(f"/v1/responses/{response_id}")
    assert status == 200
    return dict(answer)


async def cancelled(served: Asked, response_id: str) -> tuple[int, Any]:
    """What a cancel is answered."""
    return await served.ask("POST", f"/v1/responses/{response_id}/cancel")


async def until(condition: Callable[[], object]) -> None:
    """Wait until it is so."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def idle(served: Scripted) -> None:
    """Wait until the engine has nothing to do."""
    await until(lambda: served.engine.running == 0)


class Reading:
    """A stream that is being read."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer
        self.read = b""

    async def upto(self, part: bytes) -> bytes:
        """Read on until ``part`` has come, and the event that it is in."""
        async with asyncio.timeout(PATIENCE):
            while part not in self.read:
                assert not self.answer.content.at_eof(), self.read
                self.read += await self.answer.content.readuntil(b"\n\n")
        return self.read

    async def rest(self) -> bytes:
        """All of it, read to its end."""
        async with asyncio.timeout(PATIENCE):
            self.read += await self.answer.content.read()
        return self.read

    async def response_id(self) -> str:
        """The id that its first event tells."""
        first = (await self.upto(b"response.created")).partition(b"data: ")[2].partition(b"\n")[0]
        return str(json.loads(first)["response"]["id"])


@asynccontextmanager
async def reading(served: Asked, body: dict[str, Any] | None = None) -> AsyncGenerator[Reading, None]:
    """A new response's stream, whose reader leaves at the end of the block."""
    wanted = {"input": "Hi", "stream": True, **(body or {})}
    async with served.client.post(f"{served.url}/v1/responses", json=wanted) as answer:
        assert answer.status == 200
        yield Reading(answer)


async def stream_events(served: Served[ScriptedEngine], body: Json) -> list[Json]:
    """The JSON of each event of a stream, which keeps every rule that we know."""
    stream = await served.stream(body)
    read_sse(stream)
    frames = stream.decode().removesuffix("data: [DONE]\n\n").split("\n\n")
    return [json.loads(frame.partition("data: ")[2]) for frame in frames if frame]


def done_items(events: list[Json]) -> list[Json]:
    """The items that the client's history grows by."""
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]
