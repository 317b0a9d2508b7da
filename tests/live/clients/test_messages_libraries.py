"""Libraries that speak the Messages API: a text, a stream, a call and its result, a structured answer, an error."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import anthropic
import litellm
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelHTTPError, ThinkingPart, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider

HELLO = "Hello! How can I help you today?"
THOUGHT = "The user wants a greeting."
WEATHER_TEXT = "It is 18 °C in Paris right now."
ASKED = "What is the weather in Paris?"
RESULT = '{"temperature":18,"unit":"C"}'
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OPTIONS: Any = {"api_key": "none", "max_tokens": 500}


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    age: Annotated[int, Field(ge=0, le=150)]


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def base(url: str) -> str:
    """The base URL for clients of Anthropic, which add the version."""
    return url.removesuffix("/v1")


def total(usage: Any) -> tuple[int, int]:
    """The tokens of the prompt and of the answer, cached ones included."""
    return usage["input_tokens"], usage["output_tokens"]


# LangChain


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    assert city == "Paris"
    return RESULT


def chat(base: str, model: str = "tiny-gpt-oss") -> ChatAnthropic:
    return ChatAnthropic(model=model, base_url=base, max_retries=0, **OPTIONS)


def test_langchain_gets_a_text_and_a_stream(base: str) -> None:
    message = chat(base).invoke("Say hello.")
    assert message.text == HELLO
    assert [block.get("reasoning") for block in message.content_blocks if block["type"] == "reasoning"] == [THOUGHT]
    first, *rest = chat(base).stream("Say hello.")
    heard: Any = sum(rest, start=first)
    assert (heard.text, total(heard.usage_metadata)) == (HELLO, total(message.usage_metadata))


@pytest.mark.parametrize("streams", [False, True])
def test_langchain_runs_a_tool(base: str, streams: bool) -> None:
    model = chat(base).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(ASKED)]
    first, *rest = model.stream(messages) if streams else [model.invoke(messages)]
    messages.append(sum(rest, start=first))
    messages += [get_weather.invoke(call) for call in messages[-1].tool_calls]
    assert model.invoke(messages).text == WEATHER_TEXT


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_gets_a_structured_answer(base: str, method: Any) -> None:
    assert isinstance(chat(base).with_structured_output(Person, method=method).invoke("Say hello."), Person)


def test_langchain_raises_an_error(base: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="gpt-9"):
        chat(base, "gpt-9").invoke("Say hello.")


# LiteLLM, which takes chat completions or messages


def complete(base: str, **options: Any) -> Any:
    return litellm.completion(api_base=base, **{"model": "anthropic/tiny-gpt-oss"} | OPTIONS | options)


def test_litellm_gets_a_text_and_a_stream(base: str) -> None:
    completion = complete(base, messages=said("Say hello."))
    message = completion.choices[0].message
    assert (message.content, message.reasoning_content) == (HELLO, THOUGHT)
    chunks = list(complete(base, messages=said("Say hello."), stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == HELLO
    assert chunks[-1].usage.total_tokens == completion.usage.total_tokens


def test_litellm_runs_a_tool(base: str) -> None:
    function = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": CITY}
    tools, messages = [{"type": "function", "function": function}], said(ASKED)
    called = complete(base, messages=messages, tools=tools).choices[0].message
    messages += [called, {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": RESULT}]
    assert complete(base, messages=messages, tools=tools).choices[0].message.content == WEATHER_TEXT


def test_litellm_gets_a_structured_answer(base: str) -> None:
    answer = complete(base, messages=said("Say hello."), response_format=Person)
    assert Person.model_validate_json(answer.choices[0].message.content)


def test_litellm_raises_an_error(base: str) -> None:
    with pytest.raises(litellm.exceptions.NotFoundError, match="gpt-9"):
        complete(base, model="anthropic/gpt-9", messages=said("Say hello."))


async def create(base: str, **options: Any) -> Any:
    model = {"model": "anthropic/tiny-gpt-oss"}
    return await litellm.anthropic.messages.acreate(api_base=base, **model | OPTIONS | options)


async def test_litellm_passes_a_text_and_a_stream_on(base: str) -> None:
    message = await create(base, messages=said("Say hello."))
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    stream = b"".join([piece async for piece in await create(base, messages=said("Say hello."), stream=True)])
    data = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: ")]
    assert "".join(each["delta"].get("text", "") for each in data if each["type"] == "content_block_delta") == HELLO


async def test_litellm_passes_a_call_and_its_result_on(base: str) -> None:
    tools = [{"name": "get_weather", "description": "Get the weather of a city.", "input_schema": CITY}]
    called = (await create(base, messages=said(ASKED), tools=tools))["content"]
    result = {"type": "tool_result", "tool_use_id": called[-1]["id"], "content": RESULT}
    messages = [*said(ASKED), {"role": "assistant", "content": called}, {"role": "user", "content": [result]}]
    assert (await create(base, messages=messages, tools=tools))["content"][-1]["text"] == WEATHER_TEXT


async def test_litellm_passes_a_schema_and_an_error_on(base: str) -> None:
    form = {"type": "json_schema", "schema": Person.model_json_schema() | {"additionalProperties": False}}
    message = await create(base, messages=said("Say hello."), output_config={"format": form})
    assert Person.model_validate_json(message["content"][-1]["text"])
    with pytest.raises(Exception, match=r'"not_found_error".*gpt-9'):
        await create(base, model="anthropic/gpt-9", messages=said("Say hello."))


# pydantic-ai


def agent(base: str, model: str = "tiny-gpt-oss", **options: Any) -> Agent[None, Any]:
    client = anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0)
    return Agent(AnthropicModel(model, provider=AnthropicProvider(anthropic_client=client)), **options)


async def test_pydantic_ai_gets_a_text_and_a_stream(base: str) -> None:
    result = await agent(base).run("Say hello.")
    assert result.output == HELLO
    assert [part.content for part in result.response.parts if isinstance(part, ThinkingPart)] == [THOUGHT]
    async with agent(base).run_stream("Say hello.") as streamed:
        assert "".join([delta async for delta in streamed.stream_text(delta=True)]) == HELLO
    assert streamed.usage.total_tokens == result.usage.total_tokens


async def test_pydantic_ai_runs_a_tool(base: str) -> None:
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        assert city == "Paris"
        return RESULT

    assert (await agent(base, tools=[get_weather]).run(ASKED)).output == WEATHER_TEXT


async def test_pydantic_ai_gets_a_structured_answer(base: str) -> None:
    assert isinstance((await agent(base, output_type=ToolOutput(Person)).run("Say hello.")).output, Person)


async def test_pydantic_ai_raises_an_error(base: str) -> None:
    with pytest.raises(ModelHTTPError, match="gpt-9"):
        await agent(base, "gpt-9").run("Say hello.")
