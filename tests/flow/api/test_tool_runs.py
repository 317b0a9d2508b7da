"""Responses that end while one of their tools runs, and the engine is idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.api.runs import scheduler
from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import ResolvedRequest, with_facts
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.tools import Toolset
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.tools import Toolbox
from penstock.stages.converse.converse import Converse
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.api_clients import PATIENCE, StreamReader, wait_until
from tests.support.event_streams import final, read_sse
from tests.support.scripted_tools import ScriptedTool
from tests.support.server import ScriptedServer, running_server, script

CODE = "<|channel|>analysis to=python code<|message|>while True: pass<|call|>"

WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "in front": ({}, False),
    "unstored": ({"store": False}, False),
    "detached": ({}, True),
    "background": ({"background": True}, False),
}
"""Modes of a response: the fields of its request, and True if its server detaches."""


async def python(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ResolvedRequest, None]:
    async for conversation in source:
        yield with_facts(conversation, tools=Toolset(kinds()["python"].tools))


@pytest.fixture
def tool() -> ScriptedTool:
    return ScriptedTool(turns=None)


@dataclass
class Busy:
    """A response whose tool runs.  ``needs_client`` is True if it ends with its client."""

    served: ScriptedServer
    stream: StreamReader
    response_id: str
    needs_client: bool


@pytest.fixture(params=WAYS)
async def busy(request: pytest.FixtureRequest, store_at: str, tool: ScriptedTool) -> AsyncIterator[Busy]:
    body, detaches = WAYS[request.param]

    def edit(whole: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        converse = Converse(whole.inner("converse"), Toolbox({"python": tool}))
        return whole.replace("converse", converse).insert_after("normalize", "python", python)

    engine = ScriptedEngine(script(CODE))
    async with (
        running_server(engine, store_at, edit=edit, detaches=detaches) as served,
        served.open_stream(body) as stream,
    ):
        response_id = await stream.response_id()
        await wait_until(lambda: tool.running == 1)
        yield Busy(served, stream, response_id, not detaches and "background" not in body)


def turn_of(served: ScriptedServer) -> tuple[int, int]:
    """The tokens of the turn that called the tool: its prompt, and its output."""
    return len(served.engine.prompts[0].token_ids), len(load_encoding().encode_markup(CODE))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "CANCEL_WAIT", 3600)
    monkeypatch.setattr(scheduler, "FINISH_WAIT", 3600)


@pytest.mark.defect("V17", "B22")
async def test_cancel_ends_a_running_tool(busy: Busy, tool: ScriptedTool) -> None:
    served, stream, response_id = busy.served, busy.stream, busy.response_id
    async with asyncio.timeout(PATIENCE):
        status, answer = await served.cancel(response_id)
        await wait_until(lambda: (tool.running, tool.cancelled, tool.closed) == (0, 1, 1))
    response = final(read_sse(await stream.rest()))
    assert (status, answer["status"], response.status) == (200, "cancelled", "cancelled")
    assert answer["output"][-1]["type"] == "code_interpreter_call"
    assert answer["output"][-1]["status"] == "incomplete"
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == turn_of(served)
    if response.store:
        assert await served.get_response(response_id) == answer
    await wait_until(lambda: (len(served.scheduler.runs), served.scheduler.in_flight.count) == (0, 0))


async def test_tool_ends_with_its_server(busy: Busy, tool: ScriptedTool) -> None:
    served, stream, response_id = busy.served, busy.stream, busy.response_id
    async with asyncio.timeout(PATIENCE):
        reader = asyncio.create_task(stream.rest())
        await served.scheduler.drain(0.05)
    response = final(read_sse(await reader))
    assert (response.status, response.error and response.error.code) == ("failed", "server_error")
    assert (tool.running, tool.cancelled, tool.closed) == (0, 1, 1)
    assert served.scheduler.in_flight.count == 0
    if response.store:
        assert (await served.get_response(response_id))["status"] == "failed"


async def test_tool_ends_with_its_foreground_client(busy: Busy, tool: ScriptedTool) -> None:
    busy.stream.answer.close()
    if busy.needs_client:
        await wait_until(lambda: (tool.running, tool.cancelled, tool.closed) == (0, 1, 1))
        await wait_until(lambda: len(busy.served.scheduler.runs) == 0)
        status, response = await busy.served.get(f"/v1/responses/{busy.response_id}")
        assert status == 404 or (response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == turn_of(
            busy.served
        )
    else:
        await asyncio.sleep(0.1)
        assert (tool.running, (await busy.served.get_response(busy.response_id))["status"]) == (1, "in_progress")
