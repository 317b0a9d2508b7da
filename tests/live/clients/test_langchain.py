from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    age: Annotated[int, Field(ge=0, le=150)]


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    assert city == "Paris"
    return '{"temperature":18,"unit":"C"}'


def chat(url: str, **options: Any) -> ChatOpenAI:
    settings = {"model": "tiny-gpt-oss", "api_key": "none", "temperature": 0, "use_responses_api": True} | options
    return ChatOpenAI(base_url=url, **settings)


def test_model_answers_with_usage(url: str) -> None:
    message: Any = chat(url).invoke("Say hello.")
    assert message.text == "Hello! How can I help you today?"
    assert message.usage_metadata["output_token_details"]["reasoning"] > 0


def test_chunks_sum_to_the_text(url: str) -> None:
    assert "".join(chunk.text for chunk in chat(url).stream("Say hello.")) == "Hello! How can I help you today?"


def test_reasoning_summary_is_a_content_block(url: str) -> None:
    message = chat(url, reasoning={"summary": "auto"}).invoke("Say hello.")
    thoughts = [block.get("reasoning") for block in message.content_blocks if block["type"] == "reasoning"]
    assert thoughts == ["The user wants a greeting."]


@pytest.mark.parametrize("by_id", [False, True], ids=["replayed", "by_id"])
def test_model_calls_a_tool(url: str, by_id: bool) -> None:
    model = chat(url, use_previous_response_id=by_id).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage("What is the weather in Paris?")]
    messages.append(model.invoke(messages))
    messages += [get_weather.invoke(call) for call in messages[-1].tool_calls]
    assert model.invoke(messages).text == "It is 18 °C in Paris right now."


def test_model_calls_a_tool_in_a_stream(url: str) -> None:
    model = chat(url).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage("What is the weather in Paris?")]
    first, *rest = model.stream(messages)
    messages.append(sum(rest, start=first))
    messages += [get_weather.invoke(call) for call in messages[-1].tool_calls]
    assert model.invoke(messages).text == "It is 18 °C in Paris right now."


def test_structured_output_is_an_instance(url: str) -> None:
    assert isinstance(chat(url).with_structured_output(Person).invoke("Say hello."), Person)


def test_required_tool_is_called(url: str) -> None:
    message = chat(url).bind_tools([get_weather], tool_choice="any", strict=True).invoke("Say hello.")
    assert message.tool_calls[0]["name"] == "get_weather"
    assert message.tool_calls[0]["args"]["city"] in {"Paris", "Rome"}
