"""Servers that stop or die, and their successors: no accepted response is lost or left hanging."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.api.runs import scheduler
from penstock.pipeline.errors import ServerStopping
from penstock.pipeline.frames import Prompt
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.runs import run
from penstock.services.store.database import DatabaseUnavailable, Row, Unit, Value
from tests.support import api_clients
from tests.support.event_streams import final, read_sse
from tests.support.server import COUNT, ENDLESS, PacedEngine, PacedServer, ScriptedServer, running_server, script
from tests.support.stored_responses import execute_sql
from tests.support.stores import FaultyDatabase, database_at, open_store, wait_until_stored

URL = "http://one.example"
"""The URL of consecutive servers: each takes the server before it for dead."""


@pytest.fixture
def endless() -> ScriptedEngine:
    return ScriptedEngine(script(ENDLESS, endless=True, latency=0.005))


@asynccontextmanager
async def next_server(store_at: str, **options: Any) -> AsyncGenerator[ScriptedServer, None]:
    """Run the next server after another one, with an engine that says hello."""
    async with running_server(ScriptedEngine(script()), store_at, url=URL, **options) as served:
        yield served


# Stopping


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"background": True}, {"background": True, "stream": True}])
async def test_stopping_server_refuses_new_responses(served: ScriptedServer, body: dict[str, Any]) -> None:
    await served.scheduler.drain(0)
    async with served.client.post(f"{served.url}/v1/responses", json={"input": "Hi", **body}) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert len(served.scheduler.runs) == 0


@pytest.mark.parametrize("body", [{}, {"stream": True}])
async def test_request_that_a_stage_holds_is_refused_by_a_stopping_server(
    tmp_path: Path, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no response yet that could fail."""
    monkeypatch.setattr(scheduler, "FINISH_WAIT", 0.1)

    async def hold(source: AsyncIterator[Prompt]) -> AsyncGenerator[Prompt, None]:
        async for prompt in source:
            await asyncio.Event().wait()
            yield prompt

    async with running_server(
        ScriptedEngine(script()), tmp_path, edit=lambda whole: whole.insert_after("render", "hold", hold)
    ) as served:
        request = served.client.post(f"{served.url}/v1/responses", json={"input": "Hi", **body})
        asking = asyncio.ensure_future(request.__aenter__())
        await api_clients.wait_until(lambda: served.scheduler.in_flight.count == 1)
        await served.scheduler.drain(0)
        answer = await asking
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        answer.close()
        assert served.scheduler.in_flight.count == 0


@pytest.mark.parametrize("detaches", [False, True])
@pytest.mark.parametrize("body", [{}, {"stream": True}])
async def test_response_whose_beginning_is_not_stored_is_refused_by_a_stopping_server(
    tmp_path: Path, body: dict[str, Any], detaches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has no event yet, and no id under which it could look for the end."""
    monkeypatch.setattr(run, "COMMIT_WAIT", 600.0)
    monkeypatch.setattr(scheduler, "FINISH_WAIT", 600.0)  # after which any request is refused
    kept = FaultyDatabase(database_at(str(tmp_path / "store.sqlite3")))
    async with running_server(ScriptedEngine(script()), kept, detaches=detaches) as served:
        with kept.stalled():
            request = served.client.post(f"{served.url}/v1/responses", json={"input": "Hi", **body})
            asking = asyncio.ensure_future(request.__aenter__())
            await api_clients.wait_until(lambda: len(served.scheduler.runs))
            await served.scheduler.drain(0)
            answer = await asking
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        answer.close()
        assert served.scheduler.in_flight.count == 0


async def test_late_detached_response_holds_no_conversation(store_at: str) -> None:
    async with running_server(ScriptedEngine(script()), store_at, detaches=True) as served:
        _, conversation = await served.post({}, "/v1/conversations")
        read = await served.scheduler.prepare(CreateResponse(input="Hi", conversation=conversation["id"]))
        served.scheduler.in_flight.stopping = True
        with pytest.raises(ServerStopping):
            await anext(served.scheduler.run(read))
        await read.aclose()
        await served.store.conversations.lock(conversation["id"], "", "resp_next", 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_body_that_a_stopping_server_cuts_off_may_be_asked_for_again(
    endless: ScriptedEngine, tmp_path: Path, path: str
) -> None:
    body = {"model": "tiny", "max_tokens": 100_000, "messages": [{"role": "user", "content": "Hi"}]}
    if path == "/v1/completions":
        body |= {"prompt": "Hi"}
        del body["messages"]
    async with running_server(endless, tmp_path, url=URL) as served:
        asking = asyncio.create_task(served.client.post(f"{served.url}{path}", json=body))
        await api_clients.wait_until(lambda: endless.running)
        await served.scheduler.drain(0.1)
        async with await asking as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


@pytest.mark.parametrize(("restarts", "status"), [(True, "completed"), (False, "failed")])
async def test_interrupted_responses_may_be_restarted(
    store_at: str, endless: ScriptedEngine, restarts: bool, status: str
) -> None:
    async with running_server(endless, store_at, url=URL, restarts=True) as served:
        async with served.open_stream() as stream:
            in_front = await stream.response_id()
            response_id = await served.start_background()
            await api_clients.wait_until(lambda: endless.running == 2)
            await served.scheduler.drain(0.1)
            assert final(read_sse(await stream.rest())).status == "failed"
        assert endless.running == 0
    async with next_server(store_at, restarts=restarts) as served:
        answer = await served.wait_for_end(response_id)
        assert (answer["status"], (await served.get_response(in_front))["status"]) == (status, "failed")
        events = read_sse(await served.replay(response_id))
        assert final(events).status == status


async def test_stream_of_another_server_ends_where_the_response_is_restarted(store_at: str) -> None:
    """Its new run has other events: a stream that went on with them would have parts of both."""
    options: dict[str, Any] = {"restarts": True, "heartbeat": 0.1}
    async with (
        running_server(ScriptedEngine(script()), store_at, **options) as other,
        aiohttp.ClientSession() as client,
    ):
        async with running_server(PacedEngine(script(COUNT), initial=60), store_at, **options) as one:
            response_id = await one.start_background()
            answer = await client.get(f"{other.url}/v1/responses/{response_id}?stream=true")
            reader = api_clients.StreamReader(answer)
            await reader.upto(b"output_text.delta")
            await one.scheduler.drain(0.1)
        with pytest.raises(aiohttp.ClientPayloadError):
            await asyncio.wait_for(reader.rest(), api_clients.PATIENCE)
        answer.close()
        assert (await other.wait_for_end(response_id))["status"] == "completed"
        assert final(read_sse(await other.replay(response_id))).status == "completed"


# Dying


@asynccontextmanager
async def dead_server(store_at: str, **options: Any) -> AsyncGenerator[tuple[PacedServer, FaultyDatabase], None]:
    """A server whose engine stops in the middle; with its database down, it behaves like a dead server."""
    kept = FaultyDatabase(database_at(store_at))
    engine = PacedEngine(script(COUNT), initial=60)
    async with running_server(engine, kept, url=URL, **options) as served:
        yield served, kept


async def die(served: ScriptedServer, kept: FaultyDatabase) -> None:
    await served.store.writer.flushed()
    kept.is_down = True


async def test_queue_of_a_dead_server_is_run(store_at: str) -> None:
    async with dead_server(store_at, limit=0) as (served, kept):
        waiting = [await served.start_background({"input": str(number)}) for number in range(4)]
        await die(served, kept)
        async with next_server(store_at, limit=1) as after:
            assert [(await after.wait_for_end(each))["status"] for each in waiting] == ["completed"] * 4
            assert [prompt.facts.response.id for prompt in after.engine.prompts] == waiting


@pytest.mark.parametrize("background", [False, True])
async def test_response_of_a_dead_server_may_be_restarted(store_at: str, background: bool) -> None:
    async with dead_server(store_at) as (served, kept), served.open_stream({"background": background}) as stream:
        response_id = await stream.response_id()
        await stream.upto(b"output_text.delta")
        await die(served, kept)
        async with next_server(store_at, restarts=True) as after:
            answer = await after.wait_for_end(response_id)
            assert answer["status"] == ("completed" if background else "failed")
            events = read_sse(await after.replay(response_id))
            assert final(events).status == answer["status"]


@asynccontextmanager
async def settled_over(store_at: str, kept: FaultyDatabase) -> AsyncGenerator[None, None]:
    """Check that a new server over the database ``kept`` ends a dead server's response as failed."""
    async with dead_server(store_at) as (served, dead), served.open_stream() as stream:
        response_id = await stream.response_id()
        await stream.upto(b"output_text.delta")
        await die(served, dead)
        async with running_server(ScriptedEngine(script()), kept, url=URL, heartbeat=0.1) as after:
            assert (await after.wait_for_end(response_id))["status"] == "failed"
            yield


class Forgetful(FaultyDatabase):
    reads = 0

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        self.reads += "from events" in sql
        if "from events" in sql and self.reads == 1:
            raise DatabaseUnavailable("It slipped its mind.")
        return await super().read(sql, *arguments)


async def test_unsettled_response_is_settled_later(store_at: str) -> None:
    forgetful = Forgetful(database_at(store_at))
    async with settled_over(store_at, forgetful):
        assert forgetful.reads > 1


class Unsure(FaultyDatabase):
    """A database that takes a response over, and loses its connection before it confirms that."""

    claims = 0

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        counts = await super().write(units)
        claims = sum("update responses set server_id = $1" in each.sql for unit in units for each in unit.statements)
        self.claims += claims
        if claims and self.claims == claims:
            raise DatabaseUnavailable("The connection is lost.")
        return counts


async def test_uncertain_claim_is_retried(store_at: str) -> None:
    unsure = Unsure(database_at(store_at))
    async with settled_over(store_at, unsure):
        assert unsure.claims > 1


async def test_unreadable_log_does_not_prevent_the_end(store_at: str) -> None:
    async with dead_server(store_at) as (served, kept), served.open_stream() as broken, served.open_stream() as whole:
        ids = [await stream.response_id() for stream in (broken, whole)]
        for stream in (broken, whole):
            await stream.upto(b"output_text.delta")
        for response_id in ids:
            await wait_until_stored(store_at, response_id, 50)
        await die(served, kept)
        async with open_store(store_at) as store:
            await execute_sql(store, f"update events set data = 'x' where response_id = '{ids[0]}'")
        async with next_server(store_at) as after:
            assert [(await after.wait_for_end(each))["status"] for each in ids] == ["failed", "failed"]


async def test_dead_server_holds_no_conversation(store_at: str) -> None:
    async with dead_server(store_at) as (served, kept):
        _, conversation = await served.post({}, "/v1/conversations")
        body = {"input": "Hi", "conversation": conversation["id"]}
        async with served.open_stream(body) as stream:
            await stream.upto(b"output_text.delta")
            await die(served, kept)
            async with next_server(store_at) as after:
                assert (await after.post(body))[1]["status"] == "completed"
                _, items = await after.get(f"/v1/conversations/{conversation['id']}/items")
                assert len(items["data"]) == 3
