from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.store.database import Unit
from penstock.services.store.sqlite import SqliteDatabase
from tests.support import server
from tests.support.api_clients import USER_MESSAGE, Json, conversation_id, openai_client, wait_until
from tests.support.event_streams import final, read_sse

pytestmark = pytest.mark.usefixtures("store_at")


@pytest.mark.defect("33")
async def test_responses_are_added_one_after_another(served: server.ScriptedServer) -> None:
    path = await served.create_conversation({"role": "developer", "content": "Be kind."})
    conversation = {"conversation": conversation_id(path)}
    _, first = await served.post({"input": "one", **conversation})
    assert first["conversation"] == {"id": conversation_id(path)}
    second = final(read_sse(await served.stream({"input": "two", **conversation})))
    _, third = await served.post({"input": "three", "background": True, **conversation})
    third = await served.wait_for_end(third["id"])
    assert first["status"] == second.status == third["status"] == "completed"
    listed = await served.conversation_items(path)
    spoken = [item["content"][0]["text"] for item in listed if item["type"] == "message"]
    assert spoken == ["Be kind.", "one", "Hello!", "two", "Hello!", "three", "Hello!"]
    assert [item for item in listed if item in first["output"]] == first["output"]
    assert listed[-2:] == third["output"]
    prompt = served.prompt_text()
    assert prompt.index("Be kind.") < prompt.index("one") < prompt.index("two") < prompt.index("three")


async def test_input_items_include_the_conversation(served: server.ScriptedServer) -> None:
    path = await served.create_conversation(*server.CONVERSATION_ITEMS)
    fields = {"input": "Hi", "conversation": conversation_id(path)}
    responses = [(await served.post(fields))[1] for _ in range(2)]
    listed = await served.conversation_items(path)
    for response, length in zip(responses, (9, 12), strict=True):
        assert await served.get(f"/v1/responses/{response['id']}") == (200, response)
        _, page = await served.get(f"/v1/responses/{response['id']}/input_items?order=asc")
        assert page["data"] == listed[:length]


async def test_counting_tokens_only_reads_the_conversation(served: server.ScriptedServer) -> None:
    path = await served.create_conversation(*server.CONVERSATION_ITEMS)
    fields = {"input": "Hi", "conversation": conversation_id(path)}
    _, counted = await served.post(fields, "/v1/responses/input_tokens")
    _, response = await served.post(fields)
    assert counted["input_tokens"] == response["usage"]["input_tokens"]


async def test_openai_python_continues_a_conversation(sdk: openai.AsyncOpenAI) -> None:
    conversation = await sdk.conversations.create()
    names: tuple[Any, ...] = (conversation.id, {"id": conversation.id})
    for name in names:
        response = await sdk.responses.create(input="Hi", conversation=name)
        assert response.conversation
        assert response.conversation.id == conversation.id
    assert len([item async for item in sdk.conversations.items.list(conversation.id)]) == 6


@pytest.mark.defect("V12", "19")
async def test_calls_and_outputs_go_through_a_conversation(served: server.ScriptedServer) -> None:
    path = await served.create_conversation()
    served.engine.script = server.script(server.CALL)
    fields = {"conversation": conversation_id(path), "tools": [server.WEATHER]}
    _, first = await served.post({"input": "How is Paris?", **fields})
    served.engine.script = server.script()
    output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "rain"}
    assert (await served.post({"input": [output], **fields}))[0] == 200
    kinds = [item["type"] for item in await served.conversation_items(path)]
    assert kinds == ["message", "reasoning", "function_call", "function_call_output", "reasoning", "message"]
    assert '{"city":"Paris"}<|call|>' in served.prompt_text()


async def test_unstored_response_only_reads_its_conversation(served: server.ScriptedServer) -> None:
    path = await served.create_conversation({"role": "user", "content": "My name is Ann."})
    before = await served.conversation_items(path)
    status, response = await served.post({"input": "Hi", "conversation": conversation_id(path), "store": False})
    assert (status, response["status"]) == (200, "completed")
    assert "Ann" in served.prompt_text()
    assert (await served.get(f"/v1/responses/{response['id']}"))[0] == 404
    assert await served.conversation_items(path) == before


@pytest.mark.parametrize("background", [False, True])
async def test_second_concurrent_response_is_refused(served: server.PacedServer, background: bool) -> None:
    path = await served.create_conversation({**USER_MESSAGE, "id": "msg_1"})
    fields = {"input": "Hi", "conversation": conversation_id(path)}
    served.engine.hold()
    running = asyncio.create_task(served.post({**fields, "background": background}))
    await wait_until(lambda: served.engine.running)
    for method, where, body in (
        ("POST", "/v1/responses", fields),
        ("POST", "/v1/responses", {**fields, "stream": True}),
        ("POST", "/v1/responses", {**fields, "background": True}),
        ("POST", f"{path}/items", {"items": [USER_MESSAGE]}),
        ("DELETE", f"{path}/items/msg_1", None),
    ):
        status, error = await served.ask(method, where, body)
        assert (status, error["error"]["code"]) == (409, "conversation_locked")
    assert len(await served.conversation_items(path)) == 1
    served.engine.say_all()
    _, first = await running
    await served.wait_for_end(first["id"])
    assert (await served.post(fields))[0] == 200
    assert len(await served.conversation_items(path)) == 7


async def test_openai_python_retries_after_a_conflict(served: server.ScriptedServer) -> None:
    path = await served.create_conversation()
    served.engine.script = server.script(latency=0.01)
    async with openai_client(served.url, retries=9) as client:
        fields: Any = {"conversation": conversation_id(path)}
        await asyncio.gather(*(client.responses.create(input=said, **fields) for said in ("one", "two")))
    assert len(await served.conversation_items(path)) == 6


async def test_conversation_may_be_deleted_during_a_response(served: server.PacedServer) -> None:
    path = await served.create_conversation()
    fields = {"input": "Hi", "conversation": conversation_id(path)}
    _, first = await served.post(fields)
    served.engine.hold()
    _, second = await served.post({**fields, "background": True})
    deleted = {"id": conversation_id(path), "object": "conversation.deleted", "deleted": True}
    assert await served.delete(path) == (200, deleted)
    served.engine.say_all()
    assert (await served.wait_for_end(second["id"]))["status"] == "completed"
    assert await served.get(f"/v1/responses/{first['id']}") == (200, first)
    assert (await served.post({"input": "Go on", "previous_response_id": first["id"]}))[0] == 200
    status, error = await served.post(fields)
    assert (status, error["error"]["code"], error["error"]["param"]) == (404, "conversation_not_found", "conversation")


async def test_conversation_continues_after_any_deletion(served: server.ScriptedServer) -> None:
    path = await served.create_conversation(*server.CONVERSATION_ITEMS)
    calls = [item["id"] for item in await served.conversation_items(path) if item["type"].endswith("_call")]
    for call in calls:
        assert (await served.delete(f"{path}/items/{call}"))[0] == 200
    status, response = await served.post({"input": "Go on", "conversation": conversation_id(path)})
    assert (status, response["status"]) == (200, "completed")


class Stalled(SqliteDatabase):
    """A database that writes nothing unless ``flows`` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.flows = asyncio.Event()
        self.flows.set()

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        await self.flows.wait()
        return await super().write(units)


@pytest.mark.parametrize("way", [{}, {"stream": True}, {"background": True}], ids=str)
async def test_cancelled_request_leaves_no_lock(tmp_path: Path, way: Json) -> None:
    database = Stalled(tmp_path / "store.sqlite3")
    async with server.running_server(ScriptedEngine(server.script()), database) as served:
        path = await served.create_conversation()
        fields = {"input": "Hi", "conversation": conversation_id(path)}
        database.flows.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await served.post({**fields, **way})
        database.flows.set()
        async with asyncio.timeout(120):
            while (await served.post(fields))[0] != 200:
                await asyncio.sleep(0.02)
        assert len(await served.conversation_items(path)) % 3 == 0
