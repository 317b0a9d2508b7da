from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import openai
import pytest
from aiohttp import web

from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import JSON, openai_client, wait_until
from tests.support.event_streams import read_sse
from tests.support.server import PacedEngine, ScriptedServer, running_server, script
from tests.support.tool_servers import web_server


@asynccontextmanager
async def proxied(url: str, *, version: aiohttp.HttpVersion, size: int) -> AsyncGenerator[str, None]:
    """The address of a proxy that requests ``url`` by that version of HTTP, and forwards ``size`` bytes at a time.

    Like nginx, it opens a connection for each request, and ends its answer when the server ends its own.
    """

    async def hand_on(request: web.Request) -> web.StreamResponse:
        async with (
            aiohttp.ClientSession(version=version) as session,
            session.request(request.method, url + request.path_qs, data=await request.read(), headers=JSON) as answer,
        ):
            kept = {name: answer.headers[name] for name in ("Content-Type", "Cache-Control") if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                for at in range(0, len(piece), size):
                    await response.write(piece[at : at + size])
            return response

    async with web_server(hand_on) as proxy:
        yield proxy


VERSIONS = [aiohttp.HttpVersion10, aiohttp.HttpVersion11]


@pytest.mark.defect("39")
@pytest.mark.parametrize("size", [1, 17, 100_000])
@pytest.mark.parametrize("version", VERSIONS, ids=str)
async def test_stream_passes_a_proxy_unchanged(served: ScriptedServer, version: aiohttp.HttpVersion, size: int) -> None:
    async with proxied(served.url, version=version, size=size) as url, openai_client(url) as client:
        async with client.responses.stream(model="tiny", input="Hi") as stream:
            response = await stream.get_final_response()
        assert response.output_text == "Hello!"
        events = [event async for event in await client.responses.retrieve(response.id, stream=True)]
        for number in (0, len(events) // 2, len(events) - 1):
            rest = await client.responses.retrieve(response.id, stream=True, starting_after=number)
            assert [event async for event in rest] == events[number + 1 :]
        assert (await client.responses.retrieve(response.id)).output_text == "Hello!"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_0", stream=True)


@pytest.mark.defect("39")
@pytest.mark.parametrize("version", VERSIONS, ids=str)
async def test_proxy_gets_events_as_they_come(tmp_path: Path, version: aiohttp.HttpVersion) -> None:
    slow = PacedEngine(script(), initial=0)
    async with running_server(slow, tmp_path) as served, proxied(served.url, version=version, size=100_000) as url:
        body = {"input": "Hi", "stream": True}
        async with served.client.post(f"{url}/v1/responses", json=body) as answer:
            first = await answer.content.readuntil(b"\n\n")
            slow.say_all()
            rest = await answer.content.read()
    assert len(read_sse(first + rest)) > 10


@pytest.mark.defect("39", "31")
@pytest.mark.parametrize("version", VERSIONS, ids=str)
async def test_client_that_leaves_its_proxy_aborts_the_engine(tmp_path: Path, version: aiohttp.HttpVersion) -> None:
    endless = ScriptedEngine(script("<|channel|>final<|message|>la la", endless=True, latency=0.005))
    async with running_server(endless, tmp_path) as served, proxied(served.url, version=version, size=17) as url:
        body = {"input": "Hi", "stream": True}
        async with served.client.post(f"{url}/v1/responses", json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            answer.close()
        await wait_until(lambda: endless.aborted and not endless.running)
