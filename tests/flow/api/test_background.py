from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.api.http.auth import Keys
from penstock.pipeline.errors import EngineDead, EngineFailed, EngineOverloaded, InvalidPrompt
from penstock.pipeline.protocol.events import ResponseCreated, ResponseInProgress, ResponseQueued
from penstock.pipeline.protocol.items import Message, of_type
from penstock.services.engines.scripted import Script, ScriptedEngine
from tests.support import api_clients
from tests.support.event_streams import final, read_sse
from tests.support.server import ENDLESS, HELLO, PacedEngine, PacedServer, ScriptedServer, running_server, script

pytestmark = pytest.mark.usefixtures("store_at")


@pytest.mark.defect("B21")
async def test_background_response_waits_runs_and_ends(served: PacedServer) -> None:
    served.engine.hold()
    response_id = await served.start_background()
    while (status := (await served.get_response(response_id))["status"]) == "queued":
        await asyncio.sleep(0.005)
    assert status == "in_progress"
    served.engine.say_all()
    answer = await served.wait_for_end(response_id)
    assert (answer["status"], len(answer["output"])) == ("completed", 2)
    assert answer["usage"]["output_tokens"] == len(served.engine.script.token_ids)


@pytest.mark.defect("B21")
async def test_store_has_the_status_of_a_background_response(served: ScriptedServer) -> None:
    served.engine.script = script(ENDLESS, endless=True, latency=0.01)
    served.scheduler.background.slots.limit = 1
    running, waiting = await served.start_background(), await served.start_background()
    await api_clients.wait_until(lambda: served.engine.running == 1)
    for response_id, status in ((running, "in_progress"), (waiting, "queued")):
        stored = await served.store.get(response_id, "")
        assert stored is not None
        assert stored.response.status == status


@pytest.mark.defect("B21")
async def test_stream_of_a_background_response_begins_queued(served: ScriptedServer) -> None:
    events = read_sse(await served.stream({"input": "Hi", "background": True}))
    assert [type(event) for event in events[:3]] == [ResponseCreated, ResponseQueued, ResponseInProgress]
    assert final(events).status == "completed"


@pytest.mark.defect("V1", "V2")
@pytest.mark.parametrize(
    "fault",
    [
        {"error": EngineFailed("It failed.")},
        {"error": EngineDead("It died."), "dies": True},
        {"error": ValueError("a bug")},
        {"refusal": InvalidPrompt("Too odd.")},
        {"refusal": EngineDead("It died.")},
        {"refusal": ValueError("a bug")},
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failure_ends_a_background_response(served: ScriptedServer, fault: dict[str, Any], stream: bool) -> None:
    served.engine.script = script(HELLO.removesuffix("<|return|>"), **fault)
    if stream:
        response = final(read_sse(await served.stream({"input": "Hi", "background": True})))
        answer = await served.get_response(response.id)
    else:
        answer = await served.wait_for_end(await served.start_background())
    assert (answer["status"], answer["error"]["code"]) == ("failed", fault_code(fault))
    assert "bug" not in answer["error"]["message"]
    assert final(read_sse(await served.replay(answer["id"]))).status == "failed"


@pytest.mark.defect("V1")
@pytest.mark.parametrize("stream", [False, True])
async def test_dead_engine_refuses_background_responses(served: ScriptedServer, stream: bool) -> None:
    served.engine.is_alive = False
    _, conversation = await served.post({}, "/v1/conversations")
    body = {"input": "Hi", "background": True, "stream": stream, "conversation": conversation["id"]}
    assert (await served.post(body))[0] == 503
    served.engine.is_alive = True
    assert (await served.post({"input": "Hi", "conversation": conversation["id"]}))[0] == 200


def fault_code(fault: dict[str, Any]) -> str:
    return "invalid_prompt" if isinstance(fault.get("refusal"), InvalidPrompt) else "server_error"


@pytest.mark.parametrize("limit", [1, 3])
async def test_background_responses_run_in_order(where: str, limit: int) -> None:
    """Only a limited number run at once; the others wait in order.  Responses that start together may overtake."""
    engine = PacedEngine(script(), initial=0)
    async with running_server(engine, where, limit=limit) as served:
        ids = [await served.start_background() for _ in range(7)]
        for done in range(7):
            async with asyncio.timeout(120):
                while (len(engine.prompts), engine.running) != (min(limit + done, 7), min(limit, 7 - done)):
                    await asyncio.sleep(0.005)
            engine.finish(engine.prompts[done].facts.response.id)
        assert all(abs(at - ids.index(prompt.facts.response.id)) < limit for at, prompt in enumerate(engine.prompts))
        assert [(await served.wait_for_end(each))["status"] for each in ids] == ["completed"] * 7


async def test_background_queue_is_bounded(served: ScriptedServer) -> None:
    served.engine.script = script(ENDLESS, endless=True, latency=0.01)
    served.scheduler.background.slots.limit, served.scheduler.background.longest = 1, 3
    for _ in range(3):
        await served.start_background()
    wanted = {"input": "Hi", "background": True}
    async with served.client.post(f"{served.url}/v1/responses", json=wanted) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert (await answer.json())["error"]["code"] == "rate_limit_exceeded"
    assert len(served.scheduler.runs) == 3


ANN, BOB, CAT = "sk-ann-0123456789ab", "sk-bob-0123456789ab", "sk-cat-0123456789ab"


@pytest.fixture
async def keyed(where: str) -> AsyncIterator[PacedServer]:
    """A server with three keys that runs one response in the background, and has places for eight more."""
    engine = PacedEngine(script(), initial=0)
    async with running_server(engine, where, limit=1, keys=Keys(given=(ANN, BOB, CAT))) as served:
        served.scheduler.background.longest = 8
        yield served


async def post_background(served: PacedServer, key: str, text: str) -> int:
    body, headers = {"input": text, "background": True}, {"Authorization": f"Bearer {key}"}
    async with served.client.post(f"{served.url}/v1/responses", json=body, headers=headers) as answer:
        return answer.status


async def test_keys_take_turns_in_the_background(keyed: PacedServer) -> None:
    for key, text in ((ANN, "a1"), (ANN, "a2"), (ANN, "a3"), (ANN, "a4"), (BOB, "b1"), (BOB, "b2"), (CAT, "c1")):
        assert await post_background(keyed, key, text) == 200
    for done in range(7):
        await api_clients.wait_until(lambda: keyed.engine.running and len(keyed.engine.prompts) == done + 1)  # noqa: B023
        keyed.engine.finish(keyed.engine.prompts[done].facts.response.id)
    order = [message.text for prompt in keyed.engine.prompts for message in of_type(prompt.facts.input, Message)]
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


async def test_one_key_cannot_fill_the_background_queue(keyed: PacedServer) -> None:
    answered = [
        (key, await post_background(keyed, key, "Hi")) for key in (ANN, ANN, ANN, ANN, ANN, ANN, BOB, BOB, BOB, CAT)
    ]
    assert [key for key, status in answered if status == 200] == [*[ANN] * 5, *[BOB] * 2, CAT]
    assert {status for _, status in answered} == {200, 503}


async def test_busy_engine_is_retried(served: ScriptedServer) -> None:
    served.engine.script = Script(refusal=EngineOverloaded("Full."))
    response_id = await served.start_background()
    await asyncio.sleep(0.05)
    assert (await served.get_response(response_id))["status"] == "queued"
    served.engine.script = script()
    assert (await served.wait_for_end(response_id))["status"] == "completed"


async def test_impossible_background_request_is_refused(served: ScriptedServer) -> None:
    served.engine.context_length = 8192
    grammar = {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": "start: ("}}
    for body, param in (({"input": "long " * 9_000}, "input"), ({"input": "Hi", "tools": [grammar]}, "tools")):
        status, error = await served.post({"background": True, **body})
        assert (status, error["error"]["param"].partition("[")[0]) == (400, param)
    assert (served.engine.prompts, len(served.scheduler.runs)) == ([], 0)


@pytest.mark.defect("V25")
@pytest.mark.parametrize(
    "fault", [{}, {"error": EngineFailed("It failed.")}, {"refusal": InvalidPrompt("Too odd.")}], ids=str
)
async def test_finished_run_is_released(served: ScriptedServer, fault: dict[str, Any]) -> None:
    served.engine.script = script(HELLO, **fault)
    for body in ({"background": True}, {"stream": True}, {}, {"store": False}):
        await served.client.post(f"{served.url}/v1/responses", json={"input": "Hi", **body})
    await api_clients.wait_until(lambda: len(served.scheduler.runs) == 0)
    await served.wait_until_idle()
    background = served.scheduler.background
    await api_clients.wait_until(lambda: not background._tasks)
    assert (background.slots._waiting, served.scheduler._interrupts) == ({}, {})


# Detached


@pytest.mark.defect("43")
async def test_detached_response_survives_its_client(where: str) -> None:
    engine = ScriptedEngine(script(latency=0.01))
    async with running_server(engine, where, detaches=True) as served:
        async with served.open_stream() as stream:
            response_id = await stream.response_id()
        assert (await served.wait_for_end(response_id))["status"] == "completed"
        again = await served.replay(response_id)
        assert read_sse(await served.stream({"input": "Hi"}))[-1].sequence_number == len(read_sse(again)) - 1
        assert (await served.post({"input": "Hi"}))[1]["status"] == "completed"


@pytest.mark.defect("43")
async def test_unstored_response_ends_with_its_client(tmp_path: Path) -> None:
    """A response that is not stored could not be fetched later, so it is aborted, with ``--detach`` or without."""
    engine = ScriptedEngine(script(ENDLESS, endless=True, latency=0.01))
    async with running_server(engine, tmp_path, detaches=True) as served:
        async with served.open_stream({"store": False}) as stream:
            await stream.response_id()
        await served.wait_until_idle()
        assert engine.aborted == 1


async def test_detached_response_may_be_refused_by_a_status(tmp_path: Path) -> None:
    engine = ScriptedEngine(Script(refusal=InvalidPrompt("Too odd.")))
    async with running_server(engine, tmp_path, detaches=True) as served:
        for stream in (False, True):
            status, error = await served.post({"input": "Hi", "stream": stream})
            assert (status, error["error"]["code"]) == (400, "invalid_prompt")
        assert served.scheduler.in_flight.count == 0
