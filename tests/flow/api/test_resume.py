from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.errors import EngineFailed
from penstock.services.engines.scripted import ScriptedEngine
from tests.support import api_clients
from tests.support.event_streams import final, read_sse
from tests.support.server import CALL, HELLO, WEATHER, PacedEngine, ScriptedServer, running_server, script

pytestmark = pytest.mark.usefixtures("store_at")


def rest(body: bytes, number: int) -> bytes:
    """A stream without the events up to that number."""
    return b"".join(frame + b"\n\n" for frame in body.removesuffix(b"\n\n").split(b"\n\n")[number + 1 :])


def numbers(body: bytes) -> range:
    return range(body.count(b"\n\n") - 1)


FAULT = {"error": EngineFailed("It failed.")}
ENDINGS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (HELLO, {}, {}, "completed"),
    (HELLO, {"chunk_size": 5}, {"reasoning": {"summary": "auto"}}, "completed"),
    (HELLO, {}, {"include": ["message.output_text.logprobs"]}, "completed"),
    (CALL, {}, {}, "completed"),
    (HELLO * 9, {}, {"max_output_tokens": 16}, "incomplete"),
    (HELLO.removesuffix("<|return|>"), FAULT, {}, "failed"),
]


@pytest.mark.defect("V5")
@pytest.mark.parametrize(("text", "options", "body", "status"), ENDINGS)
@pytest.mark.parametrize("background", [False, True])
async def test_stored_response_is_streamed_again(
    served: ScriptedServer, text: str, options: dict[str, Any], body: dict[str, Any], status: str, *, background: bool
) -> None:
    served.engine.script = script(text, **options)
    first = await served.stream({"input": "Hi", "tools": [WEATHER], "background": background, **body})
    response = final(read_sse(first))
    assert response.status == status
    path = f"/v1/responses/{response.id}?stream=true"
    assert await served.again(path) == first
    await api_clients.wait_until(lambda: len(served.scheduler.runs) == 0)
    assert await served.again(path) == first
    assert await served.again(f"{path}&starting_after=7") == rest(first, 7)


@pytest.mark.defect("V3")
async def test_stream_resumes_after_any_event(served: ScriptedServer) -> None:
    first = await served.stream({"input": "Hi"})
    path = f"/v1/responses/{final(read_sse(first)).id}?stream=true&starting_after"
    for number in numbers(first):
        async with asyncio.timeout(api_clients.PATIENCE):
            assert await served.again(f"{path}={number}") == rest(first, number)
    assert await served.again(f"{path}={numbers(first)[-1]}") == b"data: [DONE]\n\n"
    assert await served.again(f"{path}=999") == rest(first, numbers(first)[-2])


@pytest.mark.defect("V3")
@pytest.mark.parametrize("background", [False, True])
async def test_live_stream_has_any_number_of_readers(served: ScriptedServer, background: bool) -> None:
    served.engine.script = script(latency=0.02)
    async with served.open_stream({"background": background}) as stream:
        path = f"/v1/responses/{await stream.response_id()}?stream=true"
        others = [asyncio.create_task(served.again(f"{path}&starting_after={number}")) for number in range(18)]
        whole = [asyncio.create_task(served.again(path)) for _ in range(3)]
        first = await stream.rest()
        assert final(read_sse(first)).status == "completed"
        assert await asyncio.gather(*whole) == [first] * 3
        expected = [rest(first, number) for number in range(18)]
        assert await asyncio.gather(*others) == expected


@pytest.mark.defect("V3")
async def test_readers_may_join_at_any_time(served: ScriptedServer) -> None:
    served.engine.script = script(latency=0.01)
    path = f"/v1/responses/{await served.start_background()}?stream=true"
    readers = list[asyncio.Task[bytes]]()
    for _ in range(30):
        readers.append(asyncio.create_task(served.again(path)))
        await asyncio.sleep(0.01)
    first, *others = await asyncio.gather(*readers)
    assert final(read_sse(first)).status == "completed"
    assert others == [first] * 29


@pytest.mark.defect("44")
@pytest.mark.parametrize("initial", [0, 5])
async def test_silent_stream_sends_comments_between_events(tmp_path: Path, initial: int) -> None:
    silent = PacedEngine(script(), initial=initial)
    async with running_server(silent, tmp_path, keep_alive=0.02) as served, served.open_stream() as stream:
        await stream.upto(b"response.created")
        await stream.upto(b": keep-alive\n\n: keep-alive\n\n")
        silent.say_all()
        body = await stream.rest()
    assert final(read_sse(body)).status == "completed"


async def test_waiting_stream_sends_comments(where: str) -> None:
    engine = ScriptedEngine(script())
    async with running_server(engine, where, keep_alive=0.03, limit=0) as served:
        response_id = await served.start_background()
        path = f"{served.url}/v1/responses/{response_id}?stream=true&starting_after=1"
        async with asyncio.timeout(api_clients.PATIENCE), served.client.get(path) as answer:
            assert answer.status == 200
            assert await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"


@pytest.mark.defect("41")
async def test_expired_stream_is_an_error(served: ScriptedServer) -> None:
    _, answer = await served.post({"input": "Hi"})
    await api_clients.wait_until(lambda: len(served.scheduler.runs) == 0)
    await served.store.sweep(3600, 0)
    for after in ("", "&starting_after=3"):
        status, error = await served.get(f"/v1/responses/{answer['id']}?stream=true{after}")
        assert (status, error["error"]["code"]) == (400, "stream_expired")
        assert "no longer kept" in error["error"]["message"]
    assert await served.get(f"/v1/responses/{answer['id']}") == (200, answer)
    await served.store.sweep(0, 0)
    assert (await served.get(f"/v1/responses/{answer['id']}"))[0] == 404


async def test_openai_python_resumes_a_background_stream(served: ScriptedServer) -> None:
    served.engine.script = script(latency=0.005)
    async with api_clients.openai_client(served.url) as sdk:
        stream: Any = await sdk.responses.create(model="tiny", input="Hi", background=True, stream=True)
        read = list[Any]()
        while not read or read[-1].type != "response.completed":
            async for event in stream:
                read.append(event)
                if event.sequence_number % 3 == 2:
                    break
            await stream.close()
            stream = await sdk.responses.retrieve(
                read[0].response.id, stream=True, starting_after=read[-1].sequence_number
            )
        await stream.close()
    assert [event.sequence_number for event in read] == list(range(len(read)))
    assert read[-1].response.output_text == "Hello!"
    assert (await served.wait_for_end(read[0].response.id))["status"] == "completed"
