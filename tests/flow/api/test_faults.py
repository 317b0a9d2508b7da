from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import EngineDead, EngineFailed
from penstock.pipeline.protocol.events import OutputTextDelta, ResponseEvent
from penstock.stages.services.engines.scripted import Script, ScriptedEngine
from tests.support.event_streams import final, read_sse
from tests.support.server import HELLO, PacedEngine, ScriptedServer, running_server, script


@pytest.mark.defect("V6")
@pytest.mark.parametrize("error", [EngineDead("The engine has died."), EngineFailed("It failed."), ValueError("a bug")])
async def test_fault_in_mid_stream_is_one_failed_event(error: Exception, served: ScriptedServer) -> None:
    served.engine.script = script(HELLO.removesuffix("<|return|>"), error=error, dies=False)
    response = final(read_sse(await served.stream({"input": "Hi"})))
    assert response.status == "failed"
    assert response.error is not None
    assert "bug" not in response.error.message
    assert [item.status for item in response.output] == ["completed", "incomplete"]
    assert (await served.get(f"/v1/responses/{response.id}"))[1]["status"] == "failed"


async def break_at_text(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[ResponseEvent, None]:
    async for event in source:
        if isinstance(event, OutputTextDelta):
            raise ZeroDivisionError
        yield event


async def test_broken_stage_after_emit_ends_the_stream(tmp_path: Path) -> None:
    def broken(pipeline: Pipeline[Any, ResponseEvent]) -> Pipeline[Any, ResponseEvent]:
        return pipeline.then("broken", break_at_text)

    async with running_server(ScriptedEngine(script()), tmp_path, edit=broken) as served:
        body = await served.stream({"input": "Hi"})
    response = final(read_sse(body))
    assert response.status == "failed"
    assert [item.status for item in response.output] == ["completed", "incomplete"]
    assert b"ZeroDivision" not in body


# Clients that leave, and silence


async def test_client_that_leaves_before_any_event_aborts_the_engine(served: ScriptedServer) -> None:
    served.engine.script = Script(token_ids=[5], endless=True, latency=0.01)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(served.post({"input": "Hi"}), 0.3)
    await served.wait_until_idle()
    assert served.engine.aborted == 1


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
