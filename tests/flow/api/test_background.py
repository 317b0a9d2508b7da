"""Responses in the background: they wait, run and end with nobody there, and are polled or followed all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from pipeline.errors import EngineDead, EngineFailed, EngineOverloaded, InvalidPrompt
from pipeline.protocol.events import ResponseCreated, ResponseInProgress, ResponseQueued
from stages.generate.scripted import Script, ScriptedEngine
from stages.harmony import HarmonyEncoding
from tests.support.event_streams import final, read_sse
from tests.support.response_lives import begun, ended, found, idle, reading, until
from tests.support.scripts import ENDLESS, HELLO, Scripted, script
from tests.support.server import serving


@pytest.fixture
def where(store_at: str) -> str:
    return store_at


@pytest.mark.defect("B21")
async def test_a_background_response_waits_runs_and_ends(served: Scripted, encoding: HarmonyEncoding) -> None:
    """It is queued when it is asked for, in progress when the engine has it, and whole at its end, usage included."""
    served.engine.script = script(encoding, latency=0.05)
    response_id = await begun(served)
    while (status := (await found(served, response_id))["status"]) == "queued":
        await asyncio.sleep(0.005)
    assert status == "in_progress"
    answer = await ended(served, response_id)
    assert (answer["status"], len(answer["output"])) == ("completed", 2)
    assert answer["usage"]["output_tokens"] == len(served.engine.script.token_ids)


@pytest.mark.defect("B21")
async def test_the_store_knows_how_far_it_is(served: Scripted, encoding: HarmonyEncoding) -> None:
    """Whoever reads the store alone, as another server does, finds the response queued, then in progress."""
    served.engine.script = script(encoding, ENDLESS, endless=True, latency=0.01)
    served.runs.background.limit = 1
    running, waiting = await begun(served), await begun(served)
    await until(lambda: served.engine.running == 1)
    for response_id, status in ((running, "in_progress"), (waiting, "queued")):
        stored = await served.store.get(response_id, "")
        assert stored is not None
        assert stored.response.status == status


@pytest.mark.defect("B21")
async def test_all_of_it_is_told_as_events(served: Scripted) -> None:
    """The stream of a background response tells that it is queued, then in progress, then the rest."""
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
async def test_a_failure_is_an_end(
    served: Scripted, encoding: HarmonyEncoding, fault: dict[str, Any], stream: bool
) -> None:
    """Whatever goes wrong, before the response began or behind that, it ends as failed, and so does its stream."""
    served.engine.script = script(encoding, HELLO.removesuffix("<|return|>"), **fault)
    if stream:
        response = final(read_sse(await served.stream({"input": "Hi", "background": True})))
        answer = await found(served, response.id)
    else:
        answer = await ended(served, await begun(served))
    assert (answer["status"], answer["error"]["code"]) == ("failed", fault_code(fault))
    assert "bug" not in answer["error"]["message"]
    assert final(read_sse(await served.again(f"/v1/responses/{answer['id']}?stream=true"))).status == "failed"


@pytest.mark.defect("V1")
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_queued_for_a_dead_engine(served: Scripted, stream: bool) -> None:
    """What would wait only to fail is turned away, and what it was to go on from is free for others."""
    served.engine.is_alive = False
    _, conversation = await served.post({}, "/v1/conversations")
    body = {"input": "Hi", "background": True, "stream": stream, "conversation": conversation["id"]}
    assert (await served.post(body))[0] == 503
    served.engine.is_alive = True
    assert (await served.post({"input": "Hi", "conversation": conversation["id"]}))[0] == 200


def fault_code(fault: dict[str, Any]) -> str:
    return "invalid_prompt" if isinstance(fault.get("refusal"), InvalidPrompt) else "server_error"


@pytest.mark.parametrize("limit", [1, 3])
async def test_background_responses_run_in_order(encoding: HarmonyEncoding, where: str, limit: int) -> None:
    """No more run at once than are allowed to; the others wait, and begin in the order in which they came.

    Those that begin at the same moment may overtake one another on their way to the engine.
    """
    engine = ScriptedEngine(script(encoding, latency=0.01))
    async with serving(engine, encoding, where, limit=limit) as served:
        ids = [await begun(served) for _ in range(7)]
        together = set[int]()
        while len(engine.prompts) < len(ids):
            together.add(engine.running)
            await asyncio.sleep(0.01)
        assert max(together) == limit
        assert all(abs(at - ids.index(prompt.response.id)) < limit for at, prompt in enumerate(engine.prompts))
        assert [(await ended(served, each))["status"] for each in ids] == ["completed"] * 7


async def test_a_queue_has_an_end(served: Scripted, encoding: HarmonyEncoding) -> None:
    """What would wait behind too many others is a 503 that says when to try again, and is not kept."""
    served.engine.script = script(encoding, ENDLESS, endless=True, latency=0.01)
    served.runs.background.limit, served.runs.background.longest = 1, 2
    for _ in range(3):
        await begun(served)
    wanted = {"input": "Hi", "background": True}
    async with served.client.post(f"{served.url}/v1/responses", json=wanted) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert (await answer.json())["error"]["code"] == "rate_limit_exceeded"
    assert len(served.runs.live) == 3


@pytest.mark.defect("31")
async def test_a_background_response_needs_no_client(served: Scripted, encoding: HarmonyEncoding) -> None:
    """A client that leaves in the middle takes nothing with it: the response comes to its end."""
    served.engine.script = script(encoding, latency=0.01)
    async with reading(served, {"background": True}) as stream:
        response_id = await stream.response_id()
        await stream.upto(b"output_item.added")
    assert (await ended(served, response_id))["status"] == "completed"
    assert served.engine.aborted == 0


async def test_a_busy_engine_is_waited_for(served: Scripted, encoding: HarmonyEncoding) -> None:
    """What the engine has no room for now is tried again, and still queued until then."""
    served.engine.script = Script(refusal=EngineOverloaded("Full."))
    response_id = await begun(served)
    await asyncio.sleep(0.05)
    assert (await found(served, response_id))["status"] == "queued"
    served.engine.script = script(encoding)
    assert (await ended(served, response_id))["status"] == "completed"


async def test_what_can_never_begin_is_refused_at_once(served: Scripted) -> None:
    """A grammar that cannot be, or too long an input, is a 400 to the request itself, and nothing is stored."""
    served.engine.context_length = 8192
    grammar = {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": "start: ("}}
    for body, param in (({"input": "long " * 9_000}, "input"), ({"input": "Hi", "tools": [grammar]}, "tools")):
        status, error = await served.post({"background": True, **body})
        assert (status, error["error"]["param"].partition("[")[0]) == (400, param)
    assert (served.engine.prompts, len(served.runs.live)) == ([], 0)


@pytest.mark.defect("V25", "B17")
@pytest.mark.parametrize(
    "fault", [{}, {"error": EngineFailed("It failed.")}, {"refusal": InvalidPrompt("Too odd.")}], ids=str
)
async def test_nothing_of_a_run_stays(served: Scripted, encoding: HarmonyEncoding, fault: dict[str, Any]) -> None:
    """Once a response is over and stored, this process holds nothing of it, however it ended."""
    served.engine.script = script(encoding, HELLO, **fault)
    for body in ({"background": True}, {"stream": True}, {}, {"store": False}):
        await served.client.post(f"{served.url}/v1/responses", json={"input": "Hi", **body})
    await until(lambda: len(served.runs.live) == 0)
    await idle(served)
    background = served.runs.background
    assert (background._waiting, background._tasks, served.runs._interrupts) == ({}, {}, {})


async def test_a_conversation_waits_with_its_response(served: Scripted, encoding: HarmonyEncoding) -> None:
    """As long as a background response is not over nothing else is added to its conversation; then all of it is."""
    served.engine.script = script(encoding, latency=0.01)
    _, conversation = await served.post({}, "/v1/conversations")
    body = {"input": "Hi", "conversation": conversation["id"]}
    response_id = await begun(served, body)
    status, error = await served.post(body)
    assert (status, error["error"]["code"]) == (409, "conversation_locked")
    await ended(served, response_id)
    _, items = await served.get(f"/v1/conversations/{conversation['id']}/items?order=asc")
    assert [item["type"] for item in items["data"]] == ["message", "reasoning", "message"]
    assert (await served.post(body))[0] == 200


async def test_openai_python_polls_and_follows(sdk: openai.AsyncOpenAI) -> None:
    """The SDK's own way: create, poll until it is over; or stream, break off, and go on behind the last event."""
    response = await sdk.responses.create(model="tiny", input="Hi", background=True)
    while response.status in ("queued", "in_progress"):
        response = await sdk.responses.retrieve(response.id)
    assert response.output_text == "Hello!"
    stream = await sdk.responses.create(model="tiny", input="Hi", background=True, stream=True)
    first = await anext(aiter(stream))
    await stream.close()
    assert first.type == "response.created"
    rest = await sdk.responses.retrieve(first.response.id, stream=True, starting_after=first.sequence_number)
    types = [event.type async for event in rest]
    assert (types[0], types[-1]) == ("response.queued", "response.completed")


# Detached


@pytest.mark.defect("43")
async def test_a_detached_response_survives_its_client(encoding: HarmonyEncoding, where: str) -> None:
    """With ``--detach`` a stored response comes to its end whether its client stays or not."""
    engine = ScriptedEngine(script(encoding, latency=0.01))
    async with serving(engine, encoding, where, detaches=True) as served:
        async with reading(served) as stream:
            response_id = await stream.response_id()
        assert (await ended(served, response_id))["status"] == "completed"
        again = await served.again(f"/v1/responses/{response_id}?stream=true")
        assert read_sse(await served.stream({"input": "Hi"}))[-1].sequence_number == len(read_sse(again)) - 1
        assert (await served.post({"input": "Hi"}))[1]["status"] == "completed"


@pytest.mark.defect("43")
async def test_what_is_not_stored_goes_with_its_client(encoding: HarmonyEncoding, tmp_path: Path) -> None:
    """Nobody could ask for the rest of a response that is not stored: it is aborted, ``--detach`` or not."""
    engine = ScriptedEngine(script(encoding, ENDLESS, endless=True, latency=0.01))
    async with serving(engine, encoding, tmp_path, detaches=True) as served:
        async with reading(served, {"store": False}) as stream:
            await stream.response_id()
        await idle(served)
        assert engine.aborted == 1


async def test_a_detached_response_is_refused_by_a_status(encoding: HarmonyEncoding, tmp_path: Path) -> None:
    """What keeps a detached response from beginning is an HTTP status, as for any other."""
    engine = ScriptedEngine(Script(refusal=InvalidPrompt("Too odd.")))
    async with serving(engine, encoding, tmp_path, detaches=True) as served:
        for stream in (False, True):
            status, error = await served.post({"input": "Hi", "stream": stream})
            assert (status, error["error"]["code"]) == (400, "invalid_prompt")
        assert served.runs.admission.running == 0
