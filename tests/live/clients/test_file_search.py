"""Vector stores, and the search in their files, as SDKs and frameworks use them."""

from __future__ import annotations

from collections.abc import Generator
from itertools import accumulate
from typing import Any

import openai
import pytest
from agents import Agent as OpenAIAgent
from agents import FileSearchTool as OpenAIFileSearchTool
from agents import ModelSettings, Runner, SQLiteSession, set_tracing_disabled
from agents import OpenAIResponsesModel as OpenAIAgentModel
from langchain_openai import ChatOpenAI
from openai.types import VectorStore
from pydantic_ai import Agent, NativeToolCallPart, NativeToolReturnPart
from pydantic_ai.capabilities import NativeTool
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.native_tools import FileSearchTool
from pydantic_ai.providers.openai import OpenAIProvider

set_tracing_disabled(disabled=True)  # traces would go to OpenAI

MODEL = "tiny-gpt-oss"
QUESTION = "Search the files for penstock."
PIPE = "A penstock is a pipe that leads water to a turbine."
GATE = "A penstock is also a gate, which holds water back."
RESULTS: Any = ["file_search_call.results"]
FORCED: Any = {"type": "file_search"}


@pytest.fixture(scope="module")
def store(client: openai.OpenAI) -> Generator[VectorStore, None, None]:
    """A vector store with two files, one of which was uploaded with attributes."""
    store = client.vector_stores.create(name="waterworks")
    files = client.vector_stores.files
    for name, text, attributes in (("pipe.txt", PIPE, {"part": "pipe", "year": 1895}), ("gate.md", GATE, {})):
        made = files.upload_and_poll(vector_store_id=store.id, file=(name, text.encode()), attributes=attributes)
        assert (made.status, made.last_error) == ("completed", None)
    yield store
    client.vector_stores.delete(store.id)


def names_of(results: Any) -> set[str]:
    """Return the names of the files in results of a search, which frameworks make plain objects."""
    return {result["filename"] for result in results}


def searching(store: VectorStore, **fields: Any) -> Any:
    return {"type": "file_search", "vector_store_ids": [store.id], **fields}


def test_openai_python_fills_and_searches_a_vector_store(client: openai.OpenAI) -> None:
    expires: Any = {"anchor": "last_active_at", "days": 1}
    store = client.vector_stores.create(name="parts", metadata={"of": "a dam"}, expires_after=expires)
    batches, files = client.vector_stores.file_batches, client.vector_stores.files
    sent = [(f"{name}.txt", text.encode()) for name, text in (("pipe", PIPE), ("gate", GATE))]
    batch = batches.upload_and_poll(store.id, files=sent, max_concurrency=2)
    assert (batch.status, batch.file_counts.completed, batch.file_counts.total) == ("completed", 2, 2)
    names = {
        client.files.retrieve(file.id).filename: file.id
        for file in batches.list_files(batch.id, vector_store_id=store.id)
    }
    assert {file.id for file in files.list(store.id, filter="completed", limit=1)} == set(names.values())
    changed = files.update(names["gate.txt"], vector_store_id=store.id, attributes={"part": "gate", "tons": 2.5})
    assert changed.attributes == {"part": "gate", "tons": 2.5}
    found = client.vector_stores.search(store.id, query=["penstock turbine", "pipe"], max_num_results=5)
    assert [(each.filename, each.file_id) for each in found.data] == [
        (name, names[name]) for name in ("pipe.txt", "gate.txt")
    ]
    assert found.data[0].content[0].text == PIPE
    assert 1 >= found.data[0].score > found.data[1].score > 0
    heavy: Any = {
        "type": "and",
        "filters": [{"type": "gt", "key": "tons", "value": 2}, {"type": "eq", "key": "part", "value": "gate"}],
    }
    assert [each.filename for each in client.vector_stores.search(store.id, query="water", filters=heavy)] == [
        "gate.txt"
    ]
    content = files.content(names["pipe.txt"], vector_store_id=store.id)
    assert [part.text for part in content] == [PIPE]
    assert files.delete(names["pipe.txt"], vector_store_id=store.id).deleted
    assert [each.filename for each in client.vector_stores.search(store.id, query="penstock")] == ["gate.txt"]
    assert client.files.retrieve(names["pipe.txt"]).filename == "pipe.txt"
    renamed = client.vector_stores.update(store.id, name="gates")
    assert renamed.file_counts.total == 1
    assert renamed in list(client.vector_stores.list(limit=1))
    assert client.vector_stores.delete(store.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input=QUESTION, tools=[searching(store)])


def test_model_searches_and_results_are_included(client: openai.OpenAI, store: VectorStore) -> None:
    body: Any = {
        "model": MODEL,
        "input": QUESTION,
        "tools": [searching(store)],
        "tool_choice": FORCED,
        "temperature": 0,
    }
    with client.responses.stream(**body, include=RESULTS) as stream:
        events = list(stream)
        response = stream.get_final_response()
    call = next(item for item in response.output if item.type == "file_search_call")
    assert {result.filename: result.text for result in call.results or ()} == {"pipe.txt": PIPE, "gate.md": GATE}
    assert {result.filename: result.attributes for result in call.results or ()}["pipe.txt"] == {
        "part": "pipe",
        "year": 1895,
    }
    of_call = [
        event
        for event in events
        if getattr(event, "item_id", getattr(getattr(event, "item", None), "id", "")) == call.id
    ]
    steps = [f"response.file_search_call.{step}" for step in ("in_progress", "searching", "completed")]
    assert [event.type for event in of_call] == ["response.output_item.added", *steps, "response.output_item.done"]
    item: Any = next(
        item for item in client.responses.retrieve(response.id, include=RESULTS).output if item.id == call.id
    )
    assert item == call


def test_filter_of_a_tool_leaves_files_out(client: openai.OpenAI, store: VectorStore) -> None:
    tool = searching(store, filters={"type": "gte", "key": "year", "value": 1890}, max_num_results=1)
    response = client.responses.create(
        model=MODEL,
        input=QUESTION,
        tools=[tool],
        tool_choice=FORCED,
        temperature=0,
        include=RESULTS,
        max_output_tokens=200,
    )
    calls = [item for item in response.output if item.type == "file_search_call"]
    assert calls
    assert {result.filename for call in calls for result in call.results or ()} == {"pipe.txt"}


@pytest.mark.parametrize("streamed", [False, True])
async def test_agent_of_openai_searches(url: str, store: VectorStore, streamed: bool) -> None:
    tool = OpenAIFileSearchTool([store.id], include_search_results=True)
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        model = OpenAIAgentModel(MODEL, client)
        settings = ModelSettings(temperature=0, tool_choice="file_search", max_tokens=200)
        agent, session = OpenAIAgent("Searcher", model=model, model_settings=settings, tools=[tool]), SQLiteSession("a")
        for _ in range(2):  # the second time with the call of the first in its input
            result: Any
            if streamed:
                result = Runner.run_streamed(agent, QUESTION, session=session)
                async for _event in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, QUESTION, session=session)
            calls = [item.raw_item for item in result.new_items if item.type == "tool_call_item"]
            assert {found.filename for found in calls[0].results} == {"pipe.txt", "gate.md"}


async def test_agent_of_pydantic_ai_searches(url: str, store: VectorStore) -> None:
    settings = OpenAIResponsesModelSettings(
        temperature=0, openai_include_file_search_results=True, extra_body={"tool_choice": FORCED}
    )
    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    searcher = NativeTool[None](FileSearchTool(file_store_ids=[store.id]))
    agent = Agent(model, model_settings=settings, capabilities=[searcher])
    first = await agent.run(QUESTION)
    for result in (first, await agent.run(QUESTION, message_history=first.all_messages())):
        parts = result.response.parts
        call = next(part for part in parts if isinstance(part, NativeToolCallPart))
        found = next(part for part in parts if isinstance(part, NativeToolReturnPart))
        assert (call.tool_name, call.tool_call_id) == ("file_search", found.tool_call_id)
        assert names_of(found.content["results"]) == {"pipe.txt", "gate.md"}


def test_langchain_searches(url: str, store: VectorStore) -> None:
    chat = ChatOpenAI(base_url=url, model=MODEL, api_key="none", temperature=0, use_responses_api=True, include=RESULTS)
    searcher = chat.bind_tools([searching(store)], tool_choice="file_search")
    asked: list[Any] = [("user", QUESTION)]
    first = searcher.invoke(asked)
    *_, whole = accumulate(searcher.stream([*asked, first, *asked]))
    for answer in (first, whole):
        blocks: dict[str, Any] = {block["type"]: block for block in answer.content_blocks}
        assert blocks["server_tool_call"]["name"] == "file_search"
        assert names_of(blocks["server_tool_result"]["output"]) == {"pipe.txt", "gate.md"}
