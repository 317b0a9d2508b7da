"""The use of each answer, in whatever way it came and ended: its row in the ledger says what the response says."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
import pytest

from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import ResolvedRequest, with_facts
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.tools import Toolset
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.store.store import Store
from penstock.services.tools import Toolbox, ToolResult
from tests.support.api_clients import wait_until
from tests.support.event_streams import final, read_sse
from tests.support.scripted_tools import ScriptedTool
from tests.support.server import ENDLESS, HELLO, ScriptedServer, running_server, script
from tests.support.socket_client import connected

Row = dict[str, Any]

COLUMNS = "id, owner, model, api, input_tokens, cached_tokens, output_tokens, reasoning_tokens, searches, images"


@pytest.fixture
async def server(store_at: str) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script()), store_at) as server:
        yield server


async def noted(store: Store) -> dict[str, Row]:
    """Return the rows of the ledger, by id, once all that was queued is written."""
    await store.writer.flushed()
    names = COLUMNS.split(", ")
    rows = await store.context.read(f"select {COLUMNS} from ledger")
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows}


async def check(server: ScriptedServer, response: Any, api: str = "responses") -> Row:
    """The only row is that of a response, with the tokens that it says."""
    rows = await noted(server.store)
    assert rows.keys() == {response["id"]}
    row, usage = rows[response["id"]], response["usage"]
    read, written = usage["input_tokens_details"], usage["output_tokens_details"]
    assert (row["api"], row["model"]) == (api, server.engine.models[0])
    assert (row["input_tokens"], row["cached_tokens"]) == (usage["input_tokens"], read["cached_tokens"])
    assert (row["output_tokens"], row["reasoning_tokens"]) == (usage["output_tokens"], written["reasoning_tokens"])
    assert row["input_tokens"] > 0
    return row


@pytest.mark.parametrize("stores", [True, False])
async def test_whole_answer(server: ScriptedServer, *, stores: bool) -> None:
    _, answer = await server.post({"input": "Hi", "store": stores})
    assert (await check(server, answer))["reasoning_tokens"] > 0


@pytest.mark.parametrize("stores", [True, False])
async def test_stream(server: ScriptedServer, *, stores: bool) -> None:
    response = final(read_sse(await server.stream({"input": "Hi", "store": stores})))
    await check(server, msgspec.to_builtins(response))


async def test_socket(server: ScriptedServer) -> None:
    async with connected(server) as client:
        response = await client.create(input="Hi", store=False)
    await check(server, msgspec.to_builtins(response))


async def test_background(server: ScriptedServer) -> None:
    await check(server, await server.wait_for_end(await server.start_background()))


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_cancelled_until_then(server: ScriptedServer, *, is_deleted: bool) -> None:
    server.engine.script = script(ENDLESS, endless=True, latency=0.001)
    response_id = await server.start_background()
    await wait_until(lambda: any(run.event_count > 4 for run in server.scheduler.runs))
    if is_deleted:
        await server.delete(f"/v1/responses/{response_id}")
        (row,) = (await noted(server.store)).values()
        assert row["id"] == response_id
    else:
        _, answer = await server.cancel(response_id)
        row = await check(server, answer)
        assert answer["status"] == "cancelled"
    assert row["output_tokens"] > 0


async def test_left_by_its_client(server: ScriptedServer) -> None:
    server.engine.script = script(ENDLESS, endless=True, latency=0.001)
    async with server.open_stream() as stream:
        response_id = await stream.response_id()
        await stream.upto(b"output_text.delta")
    await check(server, await server.wait_for_end(response_id))


async def test_detached(store_at: str) -> None:
    async with running_server(ScriptedEngine(script(latency=0.01)), store_at, detaches=True) as server:
        async with server.open_stream() as stream:
            response_id = await stream.response_id()
        response = await server.wait_for_end(response_id)
        assert response["status"] == "completed"
        await check(server, response)


async def test_failed(server: ScriptedServer) -> None:
    server.engine.script = script(HELLO, error=EngineFailed("No."))
    _, answer = await server.post({"input": "Hi"})
    assert (answer["status"], answer["usage"]) == ("failed", None)
    (row,) = (await noted(server.store)).values()
    assert (row["id"], row["input_tokens"], row["output_tokens"]) == (answer["id"], 0, 0)


async def test_several_choices_count_each(server: ScriptedServer) -> None:
    _, answer = await server.post(
        {"messages": [{"role": "user", "content": "Hi"}], "n": 3, "model": server.engine.models[0]},
        "/v1/chat/completions",
    )
    rows = (await noted(server.store)).values()
    assert [row["input_tokens"] for row in rows] == [answer["usage"]["prompt_tokens"]] * 3
    assert sum(row["output_tokens"] for row in rows) == answer["usage"]["completion_tokens"]
    assert {row["api"] for row in rows} == {"chat"}


async def test_refused_request_is_no_use(server: ScriptedServer) -> None:
    for body in ({"input": 3}, {"input": "Hi", "model": "other"}, {"input": "Hi", "previous_response_id": "resp_0"}):
        status, _ = await server.post(body)
        assert status >= 400
    assert await noted(server.store) == {}


async def searching(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ResolvedRequest, None]:
    async for conversation in source:
        yield with_facts(conversation, tools=Toolset((*kinds()["browser"].tools, *kinds()["python"].tools)))


SEARCH = '<|channel|>commentary to=browser.search code<|message|>{"query":"tea"}<|call|>'
CODE = "<|channel|>analysis to=python code<|message|>1 + 1<|call|>"


async def test_tools_count_with_their_seconds(store_at: str) -> None:
    tool = ScriptedTool(turns=3, outcomes=(ToolResult("2"),))
    engine = ScriptedEngine(script(), turns=[script(SEARCH), script(CODE), script(SEARCH)])
    async with running_server(
        engine,
        store_at,
        toolbox=Toolbox({"python": tool, "browser": tool}),
        edit=lambda whole: whole.insert_after("normalize", "searching", searching),
    ) as server:
        _, answer = await server.post({"input": "Hi"})
        row = await check(server, answer)
        assert row["searches"] == 2
        ((seconds,),) = await server.store.context.read("select tool_seconds from ledger")
        assert seconds > 0
    assert len(tool.calls) == 3
