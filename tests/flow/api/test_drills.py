"""Fault drills: at each point of a stream a fault occurs, or the client disconnects.

After each drill there is exactly one terminal event or a closed connection, the engine's request is gone, no task is
left, and the server answers the next request.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import EngineDead, EngineFailed
from penstock.pipeline.frames import Prompt
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.items import Reasoning
from penstock.pipeline.protocol.response import Response
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import CHANNEL, END, MESSAGE, START, load_encoding
from tests.support.api_clients import wait_until
from tests.support.event_streams import final, read_sse
from tests.support.server import CALL, ENDLESS, HELLO, WEATHER, ScriptedServer, running_server, script

BODY = {"input": "Hi", "tools": [WEATHER]}
TALK = HELLO.removesuffix("<|return|>") + "<|end|><|start|>assistant" + CALL


@asynccontextmanager
async def drill(served: ScriptedServer) -> AsyncGenerator[None, None]:
    """Check after a drill that nothing new is still running, and that the server answers."""
    await served.post(BODY)
    before = len(asyncio.all_tasks())
    yield
    await wait_until(lambda: not served.engine.running and len(asyncio.all_tasks()) <= before)
    served.engine.script = Script(served.engine.script.token_ids)
    assert (await served.post(BODY))[0] == 200


async def streamed(served: ScriptedServer) -> Response:
    return final(read_sse(await served.stream(BODY)))


@pytest.mark.defect("11", "12", "V6")
@pytest.mark.parametrize(
    ("error", "step"), [(EngineFailed("It failed."), 1), (EngineDead("It died."), 3), (ValueError("a bug"), 3)], ids=str
)
async def test_engine_fault_at_any_token_fails_the_response(
    served: ScriptedServer, error: Exception, step: int
) -> None:
    tokens = load_encoding().encode_markup(TALK)
    async with drill(served):
        for count in range(0, len(tokens), step):
            served.engine.script = Script(tokens[:count], error=error)
            response = await streamed(served)
            assert response.status == "failed"
            assert response.error is not None
            assert response.error.code == "server_error"
            assert "bug" not in response.error.message
            assert all(item.status == "completed" for item in response.output[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_stopped_engine_refuses_admitted_requests(tmp_path: Path, stream: bool) -> None:
    engine = ScriptedEngine(script(ENDLESS, endless=True))

    async def stop(source: AsyncIterator[Prompt]) -> AsyncGenerator[Prompt, None]:
        async for prompt in source:
            await engine.stop()
            yield prompt

    async with running_server(
        engine, tmp_path, edit=lambda whole: whole.insert_before("generate", "stop", stop)
    ) as served:
        async with served.client.post(f"{served.url}/v1/responses", json={**BODY, "stream": stream}) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert (await answer.json())["error"]["type"] == "server_error"
        assert (engine.prompts, served.scheduler.in_flight.count) == ([], 0)


JUNK = [[START], [START, START], [CHANNEL], [MESSAGE], [END, END], [200_010], [201_087], [185], [CHANNEL, 185, MESSAGE]]


@pytest.mark.parametrize("shift", [0, 4])
async def test_malformed_tokens_at_any_place_keep_the_rules(served: ScriptedServer, shift: int) -> None:
    tokens = load_encoding().encode_markup(TALK)
    async with drill(served):
        for count in range(len(tokens)):
            junk = JUNK[(count + shift) % len(JUNK)]
            served.engine.script = Script([*tokens[:count], *junk, *tokens[count:]])
            assert (await streamed(served)).status == "completed"


@pytest.mark.defect("38")
@pytest.mark.parametrize("ending", ["", "<|end|>", "<|start|>", "<|start|>assistant<|channel|>"])
async def test_stream_that_ends_in_reasoning_has_an_end(served: ScriptedServer, ending: str) -> None:
    served.engine.script = script("<|channel|>analysis<|message|>Hm" + ending)
    response = await streamed(served)
    assert response.status == "completed"
    assert [type(item) for item in response.output] == [Reasoning]


@pytest.mark.defect("31")
async def test_client_may_leave_after_any_event(served: ScriptedServer) -> None:
    patient = script(TALK, latency=0.002)
    async with drill(served):
        served.engine.script = patient
        count = (await served.stream(BODY)).count(b"\n\n")
        for number in range(0, count, 3):
            async with served.client.post(f"{served.url}/v1/responses", json={**BODY, "stream": True}) as answer:
                for _ in range(number):
                    await answer.content.readuntil(b"\n\n")
                answer.close()
            await served.wait_until_idle()


async def test_client_that_leaves_before_any_event_aborts_the_engine(served: ScriptedServer) -> None:
    served.engine.script = Script(token_ids=[5], endless=True, latency=0.01)
    leaving = asyncio.create_task(served.post({"input": "Hi"}))
    await wait_until(lambda: served.engine.running == 1)
    leaving.cancel()
    await served.wait_until_idle()
    assert served.engine.aborted == 1


async def connected(served: ScriptedServer, body: dict[str, Any]) -> socket.socket:
    """Open a connection with a small buffer and send a request over it."""
    loop, connection = asyncio.get_running_loop(), socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    host, port = served.url.removeprefix("http://").split(":")
    await loop.sock_connect(connection, (host, int(port)))
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/responses HTTP/1.0\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    await loop.sock_sendall(connection, f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


async def test_slow_reader_gets_everything(served: ScriptedServer) -> None:
    loop = asyncio.get_running_loop()
    async with drill(served):
        served.engine.script = script(ENDLESS, endless=True, chunk_size=20)
        connection = await connected(served, BODY | {"max_output_tokens": 8_000})
        read = bytearray()
        while piece := await loop.sock_recv(connection, 16_384):
            read += piece
            await asyncio.sleep(0.001)
            if len(read) < 100_000:
                assert (await served.get("/health"))[0] == 200
        connection.close()
    response = final(read_sse(bytes(read.partition(b"\r\n\r\n")[2])))
    assert (response.status, response.usage and response.usage.output_tokens) == ("incomplete", 8_000)


async def test_blocked_reader_stops_the_engine(served: ScriptedServer) -> None:
    async with drill(served):
        served.engine.script = script(ENDLESS, endless=True, chunk_size=20)
        connection = await connected(served, BODY)
        while not served.engine.running:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)
        assert served.engine.running == 1
        connection.close()


def cancelled_at(number: int) -> Any:
    """A change to a pipeline: the handler's task is cancelled at the event with that number."""

    async def cancel(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[ResponseEvent, None]:
        async for event in source:
            task = asyncio.current_task()
            if event.sequence_number == number and task:
                task.cancel()
            yield event

    def edit(pipeline: Pipeline[Any, ResponseEvent]) -> Pipeline[Any, ResponseEvent]:
        return pipeline.then("cancel", cancel)

    return edit


@pytest.mark.parametrize("number", range(0, 24, 3))
async def test_cancelled_task_closes_its_connection(tmp_path: Path, number: int) -> None:
    engine = ScriptedEngine(script(TALK))
    async with running_server(engine, tmp_path, edit=cancelled_at(number)) as served:
        with pytest.raises(aiohttp.ClientError):
            await served.stream(BODY)
        assert (engine.running, engine.aborted) == (0, 1)
        assert (await served.get("/v1/models"))[0] == 200
