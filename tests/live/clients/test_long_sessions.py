"""Long sessions of real clients: connections that remember, compaction, and thoughts that the client carries."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from agents.memory import OpenAIResponsesCompactionSession
from agents.models.openai_responses import OpenAIResponsesWSModel
from openai.types.responses import Response

set_tracing_disabled(disabled=True)  # traces would go to OpenAI

HELLO = "Hello! How can I help you today?"
PARIS = "It is 18 °C in Paris right now."
TALK: Any = [
    {"role": "user", "content": "Write hello into hello.txt."},
    {"role": "assistant", "content": "hello.txt now says hello."},
]


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    assert city == "Paris"
    return '{"temperature":18,"unit":"C"}'


@pytest.fixture
async def asynchronous(url: str) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def response_over(connection: Any, **fields: Any) -> Response:
    """Create a response on a connection, and return it as it ends."""
    connection.response.create(model="tiny-gpt-oss", temperature=0, **fields)
    for event in connection:
        if event.type == "response.completed":
            response: Response = event.response
            return response
    raise AssertionError("the connection was closed")


def test_connection_goes_on_without_a_store(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        first = response_over(connection, input="Say hello.", store=False)
        assert first.output_text == HELLO
        second = response_over(connection, input="Say hello.", store=False, previous_response_id=first.id)
    assert second.output_text == HELLO
    assert first.usage
    assert second.usage
    assert second.usage.input_tokens > first.usage.total_tokens - first.usage.output_tokens


def test_connection_prepares_a_response(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        prepared = response_over(connection, input="Say hello.", store=False, generate=False)
        assert prepared.output == []
        response = response_over(connection, input="Say hello.", store=False, previous_response_id=prepared.id)
        assert response.output_text == HELLO


async def test_async_connection_streams_two_lanes(asynchronous: openai.AsyncOpenAI) -> None:
    requests = {"a": "Say hello.", "b": "Say hello."}
    texts = dict.fromkeys(requests, "")
    left = set(requests)
    async with asynchronous.responses.connect() as connection:
        for lane, text in requests.items():
            await connection.response.create(model="tiny-gpt-oss", input=text, temperature=0, stream_id=lane)
        async for event in connection:
            lane = str(event.stream_id)
            if event.type == "response.output_text.delta":
                texts[lane] += event.delta
            elif event.type == "response.completed":
                left.discard(lane)
                if not left:
                    break
    assert texts == {"a": HELLO, "b": HELLO}


def test_compacted_conversation_goes_on(client: openai.OpenAI) -> None:
    compacted = client.responses.compact(model="tiny-gpt-oss", input=TALK)
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.usage.output_tokens > 0
    window: Any = [item.to_dict(warnings=False) for item in compacted.output]
    again = [*window, {"role": "user", "content": "Say hello."}]
    assert client.responses.create(model="tiny-gpt-oss", input=again, temperature=0).output_text == HELLO


def test_changed_compaction_is_refused_with_its_code(client: openai.OpenAI) -> None:
    compacted = client.responses.compact(model="tiny-gpt-oss", input=TALK)
    item: Any = compacted.output[-1].to_dict(warnings=False)
    item["encrypted_content"] = item["encrypted_content"][:-9] + "AAAAAAAAA"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="tiny-gpt-oss", input=[TALK[0], item])
    assert refused.value.code == "invalid_encrypted_content"


def test_thought_is_carried_by_the_client(client: openai.OpenAI) -> None:
    include: Any = ["reasoning.encrypted_content"]
    first = client.responses.create(
        model="tiny-gpt-oss", input="Say hello.", temperature=0, store=False, include=include
    )
    thought = first.output[0]
    assert thought.type == "reasoning"
    assert thought.encrypted_content
    items: Any = [item.to_dict() for item in first.output]
    del items[0]["content"]
    again = [{"role": "user", "content": "Say hello."}, *items, {"role": "user", "content": "Say hello."}]
    second = client.responses.create(model="tiny-gpt-oss", input=again, temperature=0, store=False)
    assert second.output_text == HELLO


async def test_agent_works_over_a_socket(asynchronous: openai.AsyncOpenAI) -> None:
    model = OpenAIResponsesWSModel("tiny-gpt-oss", asynchronous)
    settings = ModelSettings(temperature=0, store=False)
    agent = Agent("Forecaster", model=model, model_settings=settings, tools=[get_weather])
    for _ in range(2):
        result = await Runner.run(agent, "What is the weather in Paris?")
        assert result.final_output == PARIS
    await model.close()


async def test_agent_goes_on_by_id_over_a_socket(asynchronous: openai.AsyncOpenAI) -> None:
    """Without a store, only the connection knows the response that the agent continues after its tool."""
    model = OpenAIResponsesWSModel("tiny-gpt-oss", asynchronous)
    settings = ModelSettings(temperature=0, store=False)
    agent = Agent("Forecaster", model=model, model_settings=settings, tools=[get_weather])
    result = Runner.run_streamed(agent, "What is the weather in Paris?", auto_previous_response_id=True)
    kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    assert result.final_output == PARIS
    assert kinds.count("response.completed") == 2
    await model.close()


async def test_agent_passes_context_management_on(asynchronous: openai.AsyncOpenAI) -> None:
    settings = ModelSettings(temperature=0, context_management=[{"type": "compaction", "compact_threshold": 20}])
    model = OpenAIResponsesModel("tiny-gpt-oss", asynchronous)
    agent = Agent("Greeter", model=model, model_settings=settings)
    result = await Runner.run(agent, [*TALK, {"role": "user", "content": "Say hello."}])
    assert "compaction_item" in [item.type for item in result.new_items]


@pytest.mark.parametrize("store", [True, False])
async def test_session_of_an_agent_is_compacted(asynchronous: openai.AsyncOpenAI, tmp_path: Path, store: bool) -> None:
    """Without a store, a session compacts the items that it has itself, sealed thoughts among them."""
    session = OpenAIResponsesCompactionSession(
        "session",
        SQLiteSession("session", tmp_path / "sessions.sqlite3"),
        client=asynchronous,
        model="gpt-tiny",
        should_trigger_compaction=lambda context: len(context["compaction_candidate_items"]) >= 4,
    )
    model = OpenAIResponsesModel("gpt-tiny", asynchronous)
    agent = Agent("Greeter", model=model, model_settings=ModelSettings(temperature=0, store=store))
    kinds = []
    for _ in range(3):
        result = await Runner.run(agent, "Say hello.", session=session)
        assert result.final_output == HELLO
        kinds.append([item.get("type", "message") for item in await session.get_items()])
    assert "compaction" in kinds[-1] + kinds[-2]
