from __future__ import annotations

from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ThinkingPart
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    age: Annotated[int, Field(ge=0, le=150)]


def agent(url: str, model: str = "tiny-gpt-oss", **options: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=url, api_key="none")
    settings = OpenAIResponsesModelSettings(temperature=0)
    return Agent(OpenAIResponsesModel(model, provider=provider), model_settings=settings, **options)


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    assert city == "Paris"
    return '{"temperature":18,"unit":"C"}'


async def test_agent_answers_with_its_reasoning(url: str) -> None:
    result = await agent(url, instructions="You greet people.").run("Say hello.")
    assert result.output == "Hello! How can I help you today?"
    [thought] = [part for part in result.response.parts if isinstance(part, ThinkingPart)]
    assert "The user wants a greeting." in str(thought)


async def test_deltas_sum_to_the_text(url: str) -> None:
    async with agent(url).run_stream("Say hello.") as result:
        text = "".join([delta async for delta in result.stream_text(delta=True)])
    assert text == "Hello! How can I help you today?"


async def test_agent_calls_a_tool(url: str) -> None:
    result = await agent(url, tools=[get_weather]).run("What is the weather in Paris?")
    assert result.output == "It is 18 °C in Paris right now."


async def test_second_run_continues_the_first(url: str) -> None:
    listener = agent(url)
    first = await listener.run("Remember the number seven.")
    second = await listener.run("What did I say before?", message_history=first.all_messages())
    assert second.output == "You asked me to remember the number seven."
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        items: Any = await client.responses.input_items.list(second.response.provider_response_id or "", order="asc")
    inputs = [item.content[0].text for item in items.data if item.type == "message" and item.role == "user"]
    assert inputs == ["Remember the number seven.", "What did I say before?"]


async def test_native_output_is_an_instance(url: str) -> None:
    result = await agent(url, output_type=NativeOutput(Person)).run("Say hello.")
    assert isinstance(result.output, Person)


async def test_tool_output_is_an_instance(url: str) -> None:
    result = await agent(url, output_type=Person).run("Say hello.")
    assert isinstance(result.output, Person)


async def test_unknown_model_raises_an_http_error(url: str) -> None:
    with pytest.raises(ModelHTTPError) as unknown:
        await agent(url, model="gpt-9").run("Say hello.")
    assert unknown.value.status_code == 404
