from __future__ import annotations

from typing import Annotated, Any, Literal

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
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel, Field

set_tracing_disabled(disabled=True)  # traces would go to OpenAI

GREEDY = ModelSettings(temperature=0)


class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    age: Annotated[int, Field(ge=0, le=150)]


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    assert city == "Paris"
    return '{"temperature":18,"unit":"C"}'


@pytest.fixture
def model(url: str) -> OpenAIResponsesModel:
    return OpenAIResponsesModel("tiny-gpt-oss", openai.AsyncOpenAI(base_url=url, api_key="none"))


async def test_agent_answers_a_question(model: OpenAIResponsesModel) -> None:
    agent = Agent("Greeter", model=model, model_settings=GREEDY, instructions="You greet people.")
    result = await Runner.run(agent, "Say hello.")
    assert result.final_output == "Hello! How can I help you today?"


async def test_agent_streams_its_answer(model: OpenAIResponsesModel) -> None:
    result = Runner.run_streamed(Agent("Greeter", model=model, model_settings=GREEDY), "Say hello.")
    text = ""
    async for event in result.stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            text += event.data.delta
    assert text == result.final_output == "Hello! How can I help you today?"


@pytest.mark.parametrize("by_id", [False, True], ids=["replayed", "by_id"])
async def test_agent_calls_a_tool(model: OpenAIResponsesModel, by_id: bool) -> None:
    agent = Agent("Forecaster", model=model, model_settings=GREEDY, tools=[get_weather])
    result = await Runner.run(agent, "What is the weather in Paris?", auto_previous_response_id=by_id)
    assert result.final_output == "It is 18 °C in Paris right now."
    kinds = [item.type for item in result.new_items]
    assert kinds == [
        "reasoning_item",
        "tool_call_item",
        "tool_call_output_item",
        "reasoning_item",
        "message_output_item",
    ]


async def test_agent_calls_a_tool_in_a_stream(model: OpenAIResponsesModel) -> None:
    agent = Agent("Forecaster", model=model, model_settings=GREEDY, tools=[get_weather])
    result = Runner.run_streamed(agent, "What is the weather in Paris?")
    async for _ in result.stream_events():
        pass
    assert result.final_output == "It is 18 °C in Paris right now."


async def test_session_keeps_the_history(model: OpenAIResponsesModel, url: str) -> None:
    agent = Agent("Listener", model=model, model_settings=GREEDY)
    session = SQLiteSession("one")
    await Runner.run(agent, "Remember the number seven.", session=session)
    result = await Runner.run(agent, "What did I say before?", session=session)
    assert result.final_output == "You asked me to remember the number seven."
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        items: Any = await client.responses.input_items.list(result.last_response_id or "", order="asc")
    inputs = [item.content[0].text for item in items.data if item.type == "message" and item.role == "user"]
    assert inputs == ["Remember the number seven.", "What did I say before?"]


async def test_agent_answers_in_its_output_type(model: OpenAIResponsesModel) -> None:
    agent = Agent("Author", model=model, model_settings=GREEDY, output_type=Person)
    result = await Runner.run(agent, "Say hello.")
    assert isinstance(result.final_output, Person)


async def test_agent_uses_a_prompt_of_the_server(model: OpenAIResponsesModel) -> None:
    greeter = Agent("Greeter", model=model, prompt={"id": "greeting", "variables": {"word": "goodbye"}})
    assert (await Runner.run(greeter, "Say hello.")).final_output == "Hello! How can I help you today?"
