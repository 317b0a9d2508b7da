from __future__ import annotations

from typing import Any

import openai
import pytest

from penstock.services.runs.event_log import Block
from tests.support.server import ScriptedServer


@pytest.mark.defect("V4")
@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=two", "starting_after"),
        ("stream=true&starting_after=", "starting_after"),
        ("starting_after=%D9%A3", "starting_after"),
        ("stream=true&starting_after=" + "9" * 5000, "starting_after"),
        ("stream=yes", "stream"),
        ("stream=true&include_obfuscation=1", "include_obfuscation"),
        ("include=everything", "include"),
        ("include[]=message.output_text.logprobs&include[]=x", "include"),
    ],
)
async def test_bad_query_is_refused(served: ScriptedServer, query: str, param: str) -> None:
    _, answer = await served.post({"input": "Hi"})
    status, error = await served.get(f"/v1/responses/{answer['id']}?{query}")
    assert (status, error["error"]["param"]) == (400, param)


async def test_known_includes_are_accepted_in_both_spellings(served: ScriptedServer) -> None:
    _, answer = await served.post({"input": "Hi"})
    query = "include=message.output_text.logprobs&include[]=reasoning.encrypted_content"
    assert await served.get(f"/v1/responses/{answer['id']}?{query}") == (200, answer)


async def test_deleted_response_is_gone(served: ScriptedServer) -> None:
    _, answer = await served.post({"input": "Hi"})
    path = f"/v1/responses/{answer['id']}"
    assert await served.delete(path) == (200, {"id": answer["id"], "object": "response", "deleted": True})
    for method, end in (("DELETE", ""), ("GET", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        status, error = await served.ask(method, path + end)
        assert (status, error["error"]["code"], error["error"]["param"]) == (404, "response_not_found", "response_id")
    status, error = await served.post({"input": "Hi", "previous_response_id": answer["id"]})
    assert (status, error["error"]["code"]) == (400, "previous_response_not_found")


async def test_response_deleted_before_its_stream_is_not_found(
    served: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, answer = await served.post({"input": "Hi"})
    blocks = served.store.blocks

    async def deleted_first(response_id: str) -> tuple[Block, ...]:
        assert await served.store.delete(response_id, "")
        return await blocks(response_id)

    monkeypatch.setattr(served.store, "blocks", deleted_first)
    status, error = await served.get(f"/v1/responses/{answer['id']}?stream=true")
    assert (status, error["error"]["code"]) == (404, "response_not_found")


# Input items


async def chained(served: ScriptedServer) -> tuple[str, list[str]]:
    """The id of a response that continues another one, and the texts of all that it was given to read, oldest first."""
    _, first = await served.post({"input": "one"})
    _, second = await served.post({"input": "two", "previous_response_id": first["id"]})
    return second["id"], ["one", "A greeting.", "Hello!", "two"]


def texts(page: dict[str, Any]) -> list[str]:
    return [item["content"][0]["text"] for item in page["data"]]


async def test_input_items_are_the_whole_input(served: ScriptedServer) -> None:
    response_id, inputs = await chained(served)
    status, page = await served.get(f"/v1/responses/{response_id}/input_items")
    assert (status, texts(page)) == (200, inputs[::-1])
    assert page["object"] == "list"
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
    assert page["has_more"] is False
    _, page = await served.get(
        f"/v1/responses/{response_id}/input_items?order=asc&include[]=reasoning.encrypted_content"
    )
    assert texts(page) == inputs


@pytest.mark.parametrize(
    ("query", "param", "code"),
    [
        ("limit=0", "limit", "integer_below_min_value"),
        ("limit=101", "limit", "integer_above_max_value"),
        ("limit=all", "limit", "invalid_type"),
        ("order=up", "order", "invalid_value"),
        ("after=x", "after", None),
        ("include=x", "include", "invalid_value"),
    ],
)
async def test_bad_page_query_is_refused(served: ScriptedServer, query: str, param: str, code: str | None) -> None:
    response_id, _ = await chained(served)
    status, error = await served.get(f"/v1/responses/{response_id}/input_items?{query}")
    assert (status, error["error"]["param"], error["error"]["code"]) == (400, param, code)


async def test_repeated_item_is_listed_once(served: ScriptedServer) -> None:
    _, first = await served.post({"input": "Hi"})
    again = [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "More!"}]
    _, second = await served.post({"input": again, "previous_response_id": first["id"]})
    _, page = await served.get(f"/v1/responses/{second['id']}/input_items?order=asc")
    listed = [item["id"] for item in page["data"]]
    assert listed[1:-1] == [item["id"] for item in first["output"]]


# The SDK


async def test_openai_python_uses_stored_responses(sdk: openai.AsyncOpenAI) -> None:
    response = await sdk.responses.create(model="tiny", input="Hi")
    includes: Any = ["message.output_text.logprobs"]
    assert (await sdk.responses.retrieve(response.id, include=includes)).output_text == "Hello!"
    stream = await sdk.responses.retrieve(response.id, stream=True, starting_after=1, include_obfuscation=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(2, len(events) + 2))
    assert getattr(events[-1], "response", None) == response
    items = [item async for item in sdk.responses.input_items.list(response.id, order="asc", limit=1)]
    assert [item.type for item in items] == ["message"]
    await sdk.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve(response.id)


async def test_stream_helper_resumes(sdk: openai.AsyncOpenAI) -> None:
    response = await sdk.responses.create(model="tiny", input="Hi")
    async with sdk.responses.stream(response_id=response.id, starting_after=3) as stream:
        assert all([event.sequence_number > 3 async for event in stream])
        assert (await stream.get_final_response()).output_text == "Hello!"


async def test_errors_become_sdk_exceptions(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve("resp_0")
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.responses.create(model="tiny", input="Hi", previous_response_id="resp_0")
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
