"""inspect-ai, by each of its providers that can have a server of one's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from inspect_ai.model import ChatMessageTool, ChatMessageUser, GenerateConfig, Model, ResponseSchema, get_model
from inspect_ai.tool import ToolInfo, ToolParams
from inspect_ai.util import json_schema
from pydantic import BaseModel, Field

CITY = ToolParams(properties={"city": json_schema(str)}, required=["city"])
WEATHER = ToolInfo(name="get_weather", description="Get the weather of a city.", parameters=CITY)
OPTIONS: dict[str, Any] = {"openai-api/penstock": {}, "vllm": {}, "openai": {"responses_api": True}}
"""The providers: those that speak Chat Completions, and the one that speaks Responses."""

pytestmark = [
    pytest.mark.parametrize("provider", OPTIONS),
    pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning"),  # its own retries
]


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    age: Annotated[int, Field(ge=0, le=150)]


def model(url: str, provider: str) -> Model:
    settings = GenerateConfig(temperature=0, max_tokens=500, max_retries=0)
    return get_model(
        f"{provider}/tiny-gpt-oss", base_url=url, api_key="none", config=settings, memoize=False, **OPTIONS[provider]
    )


async def test_model_answers(url: str, provider: str) -> None:
    output = await model(url, provider).generate("Say hello.")
    assert (output.completion, output.stop_reason) == ("Hello! How can I help you today?", "stop")


async def test_model_calls_a_tool(url: str, provider: str) -> None:
    asked, messages = model(url, provider), [ChatMessageUser(content="What is the weather in Paris?")]
    called = (await asked.generate(messages, tools=[WEATHER])).message
    [call] = called.tool_calls or []
    assert (call.function, call.arguments) == ("get_weather", {"city": "Paris"})
    result = ChatMessageTool(content='{"temperature":18,"unit":"C"}', tool_call_id=call.id, function=call.function)
    answer = await asked.generate([*messages, called, result], tools=[WEATHER])
    assert answer.completion == "It is 18 °C in Paris right now."


async def test_answer_fits_its_schema(url: str, provider: str) -> None:
    form = GenerateConfig(response_schema=ResponseSchema(name="person", json_schema=json_schema(Person)))
    output = await model(url, provider).generate("Say hello.", config=form)
    assert Person.model_validate_json(output.completion)


async def test_model_knows_that_the_context_is_full(url: str, provider: str) -> None:
    assert (await model(url, provider).generate("word " * 20_000)).stop_reason == "model_length"
