"""strands-agents over Chat Completions and Responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel
from strands.types.exceptions import ContextWindowOverflowException

HELLO = "Hello! How can I help you today?"
LIMITS = {OpenAIModel: "max_tokens", OpenAIResponsesModel: "max_output_tokens"}

pytestmark = pytest.mark.parametrize("kind", LIMITS, ids=["chat", "responses"])


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    age: Annotated[int, Field(ge=0, le=150)]


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    assert city == "Paris"
    return '{"temperature":18,"unit":"C"}'


def agent(url: str, kind: Any, **options: Any) -> Agent:
    client = {"base_url": url, "api_key": "none", "max_retries": 0}
    model = kind(client_args=client, model_id="tiny-gpt-oss", params={"temperature": 0, LIMITS[kind]: 500})
    return Agent(model, callback_handler=None, **options)


def test_agent_answers_with_its_reasoning(url: str, kind: Any) -> None:
    thought, text = agent(url, kind)("Say hello.").message["content"]
    assert thought["reasoningContent"]["reasoningText"]["text"] == "The user wants a greeting."
    assert text == {"text": HELLO}


async def test_deltas_sum_to_the_text(url: str, kind: Any) -> None:
    events = [event async for event in agent(url, kind).stream_async("Say hello.")]
    assert "".join(event["data"] for event in events if "data" in event) == HELLO


def test_agent_calls_a_tool(url: str, kind: Any) -> None:
    asked = agent(url, kind, tools=[get_weather])
    assert str(asked("What is the weather in Paris?")).strip() == "It is 18 °C in Paris right now."


def test_structured_output_is_an_instance(url: str, kind: Any) -> None:
    answer = agent(url, kind)("Say hello.", structured_output_model=Person)
    assert isinstance(answer.structured_output, Person)


def test_agent_knows_that_the_context_is_full(url: str, kind: Any) -> None:
    with pytest.raises(ContextWindowOverflowException):
        agent(url, kind)("word " * 20_000)
