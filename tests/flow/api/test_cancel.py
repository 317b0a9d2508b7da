"""Cancelling: a response in any state ends at once, keeps its output, and sends each reader a terminal event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import ItemDelta, ParsedFrame, TokenFrame
from penstock.pipeline.protocol.response import Response
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.runs.run import RunReleased
from penstock.services.store.database import Row, Value
from tests.support import api_clients
from tests.support.event_streams import final, read_sse
from tests.support.server import ENDLESS, ScriptedServer, running_server, script
from tests.support.stores import FaultyDatabase, database_at, open_store

pytestmark = pytest.mark.usefixtures("store_at")


def endless(served: ScriptedServer, latency: float = 0.005) -> None:
    served.engine.script = script(ENDLESS, endless=True, latency=latency)


def assert_cancelled(response: Response | dict[str, Any]) -> None:
    fields = response if isinstance(response, dict) else {name: getattr(response, name) for name in FIELDS}
    assert [fields[name] for name in FIELDS] == ["cancelled", None, None, None]


FIELDS = ("status", "error", "incomplete_details", "completed_at")


@pytest.mark.defect("13")
async def test_cancel_of_an_unknown_response_is_not_found(served: ScriptedServer) -> None:
    status, error = await served.cancel("resp_0")
    assert (status, error["error"]["code"]) == (404, "response_not_found")


@pytest.mark.defect("13")
async def test_finished_foreground_response_is_not_cancellable(served: ScriptedServer) -> None:
    _, answer = await served.post({"input": "Hi"})
    status, error = await served.cancel(answer["id"])
    assert (status, error["error"]["param"]) == (400, "response_id")
    assert "background" in error["error"]["message"]


@pytest.mark.defect("13")
async def test_cancelled_queued_response_never_runs(served: ScriptedServer) -> None:
    endless(served)
    served.scheduler.background.slots.limit = 1
    running, waiting = await served.start_background(), await served.start_background()
    await api_clients.wait_until(lambda: served.engine.running == 1)
    status, answer = await served.cancel(waiting)
    assert status == 200
    assert_cancelled(answer)
    assert (answer["output"], answer["usage"]) == ([], None)
    assert await served.get_response(waiting) == answer
    events = read_sse(await served.replay(waiting))
    assert [event.__struct_config__.tag for event in events] == [
        "response.created",
        "response.queued",
        "response.incomplete",
    ]
    await served.cancel(running)
    await api_clients.wait_until(lambda: len(served.scheduler.runs) == 0)
    assert [prompt.facts.response.id for prompt in served.engine.prompts] == [running]


@pytest.mark.defect("42")
async def test_unstored_stream_can_be_cancelled(served: ScriptedServer) -> None:
    endless(served)
    async with served.open_stream({"store": False}) as stream:
        response_id = await stream.response_id()
        await stream.upto(b"output_text.delta")
        status, answer = await served.cancel(response_id)
        response = final(read_sse(await stream.rest()))
    assert (status, served.engine.running) == (200, 0)
    assert_cancelled(answer)
    assert_cancelled(response)
    assert (await served.cancel(response_id))[0] == 404


@pytest.mark.defect("B22")
async def test_concurrent_cancels_agree(served: ScriptedServer) -> None:
    endless(served)
    response_id = await served.start_background()
    await api_clients.wait_until(lambda: served.engine.running == 1)
    first, *others = await asyncio.gather(*(served.cancel(response_id) for _ in range(5)))
    assert first[0] == 200
    assert_cancelled(first[1])
    assert others == [first] * 4


@pytest.mark.defect("B22")
@pytest.mark.parametrize("background", [False, True])
async def test_first_end_of_a_response_counts(served: ScriptedServer, background: bool) -> None:
    served.engine.script = script(latency=0.001)
    for pause in range(12):
        async with served.open_stream({"background": background}) as stream:
            response_id = await stream.response_id()
            await asyncio.sleep(pause * 0.004)
            status, answer = await served.cancel(response_id)
            response = final(read_sse(await stream.rest()))
        stored = await served.get_response(response_id)
        assert stored["status"] == response.status
        assert (status, answer) in ((200, stored), (400, answer))
        assert status == 200 or (response.status == "completed" and not background)
        assert read_sse(await served.replay(response_id)) == read_sse(stream.read)


# Stages that are hard to cancel


async def never_ends(source: AsyncIterator[TokenFrame]) -> AsyncGenerator[TokenFrame, None]:
    count = 0
    async for frame in source:
        yield frame
        count += 1
        if count == 20:
            await asyncio.Event().wait()


async def breaks_when_cancelled(source: AsyncIterator[TokenFrame]) -> AsyncGenerator[TokenFrame, None]:
    try:
        async for frame in never_ends(source):
            yield frame
    except asyncio.CancelledError:
        raise ValueError("a bug") from None


@pytest.mark.defect("B22")
@pytest.mark.parametrize("stage", [never_ends, breaks_when_cancelled])
@pytest.mark.parametrize("background", [False, True])
async def test_hanging_stage_is_cancelled(where: str, stage: Any, background: bool) -> None:
    def hanging(whole: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        return whole.insert_after("generate", "hanging", stage)

    engine = ScriptedEngine(script(ENDLESS, endless=True, latency=0.001))
    async with running_server(engine, where, edit=hanging) as served:
        async with served.open_stream({"background": background}) as stream:
            response_id = await stream.response_id()
            await asyncio.sleep(0.2)
            status, answer = await served.cancel(response_id)
            assert status == 200
            response = final(read_sse(await stream.rest()))
        assert_cancelled(answer)
        assert_cancelled(response)
        assert await served.get_response(response_id) == answer
        await served.wait_until_idle()
        await api_clients.wait_until(lambda: served.scheduler.in_flight.count == 0)


async def loud(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield ItemDelta(frame.text * 10_000) if isinstance(frame, ItemDelta) else frame


@pytest.mark.defect("42")
async def test_client_that_does_not_read_gets_an_end(where: str) -> None:
    engine = ScriptedEngine(script(ENDLESS, endless=True, latency=0.001))
    async with running_server(engine, where, edit=lambda whole: whole.insert_after("parse", "loud", loud)) as served:
        async with served.open_stream() as stream:
            response_id = await stream.response_id()
            (run,) = served.scheduler.runs
            written = -1
            while written < (written := run.log.last_number):  # until the stream takes no more
                await asyncio.sleep(0.2)
            status, answer = await served.cancel(response_id)
            assert (status, engine.running) == (200, 0)
            events = read_sse(await stream.rest())
        assert_cancelled(answer)
        assert_cancelled(final(events))
        assert await served.get_response(response_id) == answer


@pytest.mark.defect("13")
async def test_answered_cancel_is_durable(where: str) -> None:
    """The answer comes after the end is stored, so no other server runs the response after a crash."""
    kept = FaultyDatabase(database_at(where))
    async with running_server(ScriptedEngine(script()), kept, limit=0) as served:
        response_id = await served.start_background()
        with kept.stalled():
            answer = asyncio.ensure_future(served.cancel(response_id))
            await asyncio.sleep(0.2)
            assert not answer.done()
        assert (await answer)[0] == 200
        async with open_store(where) as after:
            stored = await after.get(response_id, "")
            assert stored
            assert stored.response.status == "cancelled"


@pytest.mark.defect("13")
async def test_cancel_of_a_moved_response_is_retried(served: ScriptedServer) -> None:
    served.scheduler.background.slots.limit = 0
    response_id = await served.start_background()
    run = served.scheduler.runs.get(response_id, "")
    assert run
    await served.scheduler.background.release_queued()
    with pytest.raises(RunReleased):
        await served.scheduler.cancel(run)


# Effects on conversations, streams and stored responses


async def test_deleting_a_running_response_cancels_it(served: ScriptedServer) -> None:
    endless(served)
    async with served.open_stream({"background": True}) as stream:
        response_id = await stream.response_id()
        await stream.upto(b"output_text.delta")
        assert (await served.delete(f"/v1/responses/{response_id}"))[1]["deleted"] is True
        assert served.engine.running == 0
        assert_cancelled(final(read_sse(await stream.rest())))
    assert (await served.get(f"/v1/responses/{response_id}"))[0] == 404


async def test_cancelled_queued_response_unlocks_its_conversation(served: ScriptedServer) -> None:
    served.scheduler.background.slots.limit = 0
    _, conversation = await served.post({}, "/v1/conversations")
    body = {"input": "Hi", "conversation": conversation["id"]}
    response_id = await served.start_background(body)
    await served.cancel(response_id)
    assert (await served.post(body))[1]["status"] == "completed"
    _, items = await served.get(f"/v1/conversations/{conversation['id']}/items")
    assert len(items["data"]) == 3


class Interrupted(FaultyDatabase):
    """A database that runs a callback after its next answer about responses."""

    happens: Callable[[], Awaitable[object]] | None = None

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        rows = await super().read(sql, *arguments)
        if "from responses" in sql and self.happens:
            happens, self.happens = self.happens, None
            await happens()
        return rows


async def test_input_items_stay_the_same_when_a_response_ends(where: str) -> None:
    kept = Interrupted(database_at(where))
    engine = ScriptedEngine(script(ENDLESS, endless=True, latency=0.005))
    async with running_server(engine, kept) as served, served.open_stream() as stream:
        response_id = await stream.response_id()
        await stream.upto(b"output_text.delta")
        kept.happens = partial(served.cancel, response_id)
        _, listed = await served.get(f"/v1/responses/{response_id}/input_items")
        assert [item["role"] for item in listed["data"]] == ["user"]
        _, again = await served.get(f"/v1/responses/{response_id}/input_items")
        assert again == listed
