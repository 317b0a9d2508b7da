"""LiteLLM: its Responses API, and its chat completions bridged to ours."""

from __future__ import annotations

from typing import Any

import litellm
import pytest
from litellm.exceptions import NotFoundError

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def respond(url: str, **options: Any) -> Any:
    settings = {"model": "openai/tiny-gpt-oss", "temperature": 0} | options
    return litellm.responses(api_base=url, api_key="none", **settings)


def test_response_has_its_text(url: str) -> None:
    assert respond(url, input="Say hello.").output_text == "Hello! How can I help you today?"


def test_deltas_sum_to_the_text(url: str) -> None:
    events = respond(url, input="Say hello.", stream=True)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "Hello! How can I help you today?"


def test_tool_call_is_continued_by_id(url: str) -> None:
    called = respond(url, input="What is the weather in Paris?", tools=[WEATHER])
    call = called.output[-1]
    assert call.name == "get_weather"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature":18,"unit":"C"}'}
    answered = respond(url, input=[output], previous_response_id=called.id, tools=[WEATHER])
    assert answered.output_text == "It is 18 °C in Paris right now."


def test_chat_completion_is_bridged(url: str) -> None:
    completion: Any = litellm.completion(
        model="openai/responses/tiny-gpt-oss",
        messages=[{"role": "user", "content": "Say hello."}],
        api_base=url,
        api_key="none",
    )
    assert completion.choices[0].message.content == "Hello! How can I help you today?"


def test_unknown_model_raises_not_found(url: str) -> None:
    with pytest.raises(NotFoundError):
        respond(url, model="openai/gpt-9", input="Say hello.")
