from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    age: Annotated[int, Field(ge=0, le=150)]


def test_response_has_its_text(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny-gpt-oss", input="Say hello.", temperature=0)
    assert response.output_text == "Hello! How can I help you today?"


def test_prompt_of_the_server_is_filled_in(client: openai.OpenAI) -> None:
    prompt: Any = {"id": "greeting", "variables": {"word": "hello"}}
    response = client.responses.create(prompt=prompt, temperature=0)
    assert response.output_text == "Hello! How can I help you today?"
    assert (response.prompt and response.prompt.version, response.instructions) == ("1", "You greet people.")
    with pytest.raises(openai.BadRequestError, match="word"):
        client.responses.create(prompt={"id": "greeting"})
    with pytest.raises(openai.NotFoundError):
        client.responses.create(prompt={"id": "farewell"})


def test_stream_helper_accumulates_the_text(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny-gpt-oss", input="Say hello.", temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == "Hello! How can I help you today?"


async def test_async_client_streams_the_text(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        events = await client.responses.create(model="tiny-gpt-oss", input="Say hello.", temperature=0, stream=True)
        text = "".join([event.delta async for event in events if event.type == "response.output_text.delta"])
    assert text == "Hello! How can I help you today?"


def test_reasoning_is_raw_or_a_summary(client: openai.OpenAI) -> None:
    raw = client.responses.create(model="tiny-gpt-oss", input="Say hello.", temperature=0).output[0]
    assert raw.type == "reasoning"
    assert raw.content
    assert raw.content[0].text == "The user wants a greeting."
    summarized = client.responses.create(
        model="tiny-gpt-oss", input="Say hello.", temperature=0, reasoning={"summary": "auto"}
    ).output[0]
    assert summarized.type == "reasoning"
    assert summarized.summary[0].text == "The user wants a greeting."


def test_tool_call_is_continued_by_id(client: openai.OpenAI) -> None:
    called = client.responses.create(
        model="tiny-gpt-oss", input="What is the weather in Paris?", tools=[WEATHER], temperature=0
    )
    call = called.output[-1]
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("get_weather", '{"city":"Paris"}')
    answered = client.responses.create(
        model="tiny-gpt-oss",
        previous_response_id=called.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature":18,"unit":"C"}'}],
        tools=[WEATHER],
        temperature=0,
    )
    assert answered.output_text == "It is 18 °C in Paris right now."


def test_tool_call_is_continued_without_the_store(client: openai.OpenAI) -> None:
    context: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    called = client.responses.create(model="tiny-gpt-oss", input=context, tools=[WEATHER], temperature=0, store=False)
    context += called.output
    call: Any = called.output[-1]
    context += [{"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature":18,"unit":"C"}'}]
    answered = client.responses.create(model="tiny-gpt-oss", input=context, tools=[WEATHER], temperature=0, store=False)
    assert answered.output_text == "It is 18 °C in Paris right now."


def test_parsed_output_is_an_instance(client: openai.OpenAI) -> None:
    response = client.responses.parse(model="tiny-gpt-oss", input="Say hello.", text_format=Person, temperature=0)
    assert isinstance(response.output_parsed, Person)


def test_streamed_output_is_an_instance(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny-gpt-oss", input="Say hello.", text_format=Person, temperature=0) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Person)


EFFORTS = pytest.mark.parametrize("effort", [None, "none"], ids=["thinking", "at_once"])
"""With the effort ``none``, a model with a chat template does not reason at all."""


@EFFORTS
def test_choice_is_enforced(client: openai.OpenAI, effort: Any) -> None:
    response = client.responses.create(
        model="tiny-gpt-oss",
        input="Say hello.",
        temperature=0,
        reasoning={"effort": effort},
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert response.output_text in {"yes", "no"}
    assert effort or response.output[0].type == "reasoning"


@EFFORTS
def test_required_tool_is_called(client: openai.OpenAI, effort: Any) -> None:
    response = client.responses.create(
        model="tiny-gpt-oss",
        input="Say hello.",
        tools=[WEATHER],
        tool_choice="required",
        temperature=0,
        reasoning={"effort": effort},
    )
    call = response.output[-1]
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in {"Paris", "Rome"}
