"""Clients that speak Chat Completions: a text, a stream, a call and its result, a structured answer, an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import instructor
import litellm
import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelHTTPError, ThinkingPart, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai import OpenAIProvider

HELLO = "Hello! How can I help you today?"
WEATHER_TEXT = "It is 18 °C in Paris right now."
ASKED = "What is the weather in Paris?"


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    age: Annotated[int, Field(ge=0, le=150)]


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
RESULT = '{"temperature":18,"unit":"C"}'

# openai


def create(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny-gpt-oss", "temperature": 0, **options})


def test_openai_gets_a_text_and_thoughts(client: openai.OpenAI) -> None:
    completion = create(client, messages=said("Say hello."))
    message = completion.choices[0].message
    assert (message.content, completion.choices[0].finish_reason) == (HELLO, "stop")
    assert message.reasoning == message.reasoning_content == "The user wants a greeting."
    assert completion.usage.completion_tokens_details.reasoning_tokens > 0


def test_openai_gets_a_stream(client: openai.OpenAI) -> None:
    chunks = list(create(client, messages=said("Say hello."), stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert (text, chunks[-1].usage.total_tokens > 0) == (HELLO, True)


@pytest.mark.parametrize("streams", [False, True])
def test_openai_runs_a_tool(client: openai.OpenAI, streams: bool) -> None:
    messages = said(ASKED)
    asked: Any = {"model": "tiny-gpt-oss", "temperature": 0, "messages": messages, "tools": [WEATHER]}
    if streams:
        with client.chat.completions.stream(**asked) as stream:
            called: Any = stream.get_final_completion()
    else:
        called = client.chat.completions.create(**asked)
    [call] = called.choices[0].message.tool_calls
    assert (called.choices[0].finish_reason, call.function.name) == ("tool_calls", "get_weather")
    messages.append(called.choices[0].message.to_dict())
    messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
    assert create(client, messages=messages, tools=[WEATHER]).choices[0].message.content == WEATHER_TEXT


def test_openai_parses_an_answer(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny-gpt-oss", temperature=0, messages=said("Say hello."), response_format=Person
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)


def test_openai_gets_choices(client: openai.OpenAI) -> None:
    completion = create(client, messages=said("Say hello."), n=3)
    assert [(choice.index, choice.message.content) for choice in completion.choices] == [(n, HELLO) for n in range(3)]


def test_openai_raises_an_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9") as error:
        create(client, model="gpt-9", messages=said("Say hello."))
    assert (error.value.param, error.value.code) == ("model", "model_not_found")


# LangChain


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    assert city == "Paris"
    return RESULT


def chat(url: str, **options: Any) -> ChatOpenAI:
    settings: Any = {"model": "tiny-gpt-oss", "api_key": "none", "temperature": 0, "use_responses_api": False} | options
    return ChatOpenAI(base_url=url, **settings)


def test_langchain_gets_a_text_and_a_stream(url: str) -> None:
    assert chat(url).invoke("Say hello.").text == HELLO
    assert "".join(chunk.text for chunk in chat(url).stream("Say hello.")) == HELLO


def test_langchain_runs_a_tool(url: str) -> None:
    model = chat(url).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(ASKED)]
    first, *rest = model.stream(messages)
    messages.append(sum(rest, start=first))
    messages += [get_weather.invoke(call) for call in messages[-1].tool_calls]
    assert model.invoke(messages).text == WEATHER_TEXT


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_langchain_gets_a_structured_answer(url: str, method: Any) -> None:
    if method == "json_mode":
        assert isinstance(chat(url).with_structured_output(None, method=method).invoke("Say hello in JSON."), dict)
    else:
        assert isinstance(chat(url).with_structured_output(Person, method=method).invoke("Say hello."), Person)


def test_langchain_raises_an_error(url: str) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        chat(url, model="gpt-9").invoke("Say hello.")


# LiteLLM


def complete(url: str, **options: Any) -> Any:
    settings = {"model": "hosted_vllm/tiny-gpt-oss", "temperature": 0} | options
    return litellm.completion(api_base=url, api_key="none", **settings)


def test_litellm_gets_a_text_and_a_stream(url: str) -> None:
    message = complete(url, messages=said("Say hello.")).choices[0].message
    assert (message.content, message.reasoning_content) == (HELLO, "The user wants a greeting.")
    chunks = complete(url, messages=said("Say hello."), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == HELLO


def test_litellm_runs_a_tool(url: str) -> None:
    messages = said(ASKED)
    called = complete(url, messages=messages, tools=[WEATHER]).choices[0].message
    messages += [called, {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": RESULT}]
    assert complete(url, messages=messages, tools=[WEATHER]).choices[0].message.content == WEATHER_TEXT


def test_litellm_raises_an_error(url: str) -> None:
    with pytest.raises(litellm.exceptions.NotFoundError, match="gpt-9"):
        complete(url, model="hosted_vllm/gpt-9", messages=said("Say hello."))


# pydantic-ai and instructor


def agent(url: str, model: str = "tiny-gpt-oss", **options: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=url, api_key="none")
    settings = OpenAIChatModelSettings(temperature=0)
    return Agent(OpenAIChatModel(model, provider=provider), model_settings=settings, **options)


async def test_pydantic_ai_gets_a_text_and_a_stream(url: str) -> None:
    result = await agent(url).run("Say hello.")
    assert result.output == HELLO
    [thought] = [part for part in result.response.parts if isinstance(part, ThinkingPart)]
    assert thought.content == "The user wants a greeting."
    async with agent(url).run_stream("Say hello.") as streamed:
        assert "".join([delta async for delta in streamed.stream_text(delta=True)]) == HELLO


async def test_pydantic_ai_runs_a_tool(url: str) -> None:
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        assert city == "Paris"
        return RESULT

    assert (await agent(url, tools=[get_weather]).run(ASKED)).output == WEATHER_TEXT


async def test_pydantic_ai_gets_a_structured_answer(url: str) -> None:
    result = await agent(url, output_type=ToolOutput(Person)).run("Say hello.")
    assert isinstance(result.output, Person)


async def test_pydantic_ai_raises_an_error(url: str) -> None:
    with pytest.raises(ModelHTTPError, match="gpt-9"):
        await agent(url, "gpt-9").run("Say hello.")


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA], ids=lambda mode: mode.name)
def test_instructor_gets_an_instance(url: str, mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=mode)
    person = client.chat.completions.create(
        model="tiny-gpt-oss", messages=said("Say hello."), temperature=0, max_retries=0, response_model=Person
    )
    assert isinstance(person, Person)
