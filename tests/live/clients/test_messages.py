"""Anthropic's SDK: a text, a stream, calls and their results, a structured answer, the number of tokens, errors."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Annotated, Any, Literal

import anthropic
import pytest
from pydantic import BaseModel, Field

HELLO = "Hello! How can I help you today?"
WEATHER_TEXT = "It is 18 °C in Paris right now."
HI: Any = [{"role": "user", "content": "Say hello."}]
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
MODEL: Any = {"model": "tiny-gpt-oss", "max_tokens": 500}


class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    age: Annotated[int, Field(ge=0, le=150)]


@pytest.fixture(scope="module")
def claude(url: str) -> Generator[anthropic.Anthropic, None, None]:
    base = url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0) as client:
        yield client


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    assert city == "Paris"
    return '{"temperature":18,"unit":"C"}'


@anthropic.beta_async_tool(name="get_weather")
async def find_weather(city: str) -> str:
    """Get the weather of a city."""
    assert city == "Paris"
    return '{"temperature":18,"unit":"C"}'


def read_by(usage: anthropic.types.Usage) -> int:
    """The tokens of the prompt, cached ones included."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_anthropic_gets_a_text_and_thoughts(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(messages=HI, **MODEL)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert (answer.content[-1].to_dict()["text"], answer.stop_reason) == (HELLO, "end_turn")


def test_anthropic_gets_a_stream(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(messages=HI, **MODEL) as stream:
        assert "".join(stream.text_stream) == HELLO
        usage = stream.get_final_message().usage
    plain = claude.messages.create(messages=HI, **MODEL).usage
    assert usage.output_tokens == plain.output_tokens > 5
    assert read_by(usage) == read_by(plain) > 5


async def test_anthropic_gets_a_stream_of_blocks(url: str) -> None:
    """The helpers of the async client, also those of its beta, take the stream apart."""
    async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        for messages in (client.messages, client.beta.messages):
            async with messages.stream(messages=HI, **MODEL) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_message()
            ended = [event.content_block for event in events if event.type == "content_block_stop"]
            assert [block.to_dict() for block in ended] == [block.to_dict() for block in final.content]
            assert "".join(event.text for event in events if event.type == "text") == HELLO
            assert "".join(event.thinking for event in events if event.type == "thinking") == ended[0].thinking


@pytest.mark.parametrize("is_beta", [False, True])
def test_anthropic_parses_an_answer(claude: anthropic.Anthropic, is_beta: bool) -> None:
    messages: Any = claude.beta.messages if is_beta else claude.messages
    assert isinstance(messages.parse(messages=HI, output_format=Person, **MODEL).parsed_output, Person)


@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "adaptive", "display": "omitted"}])
def test_anthropics_tool_runner_calls_a_function(claude: anthropic.Anthropic, thinking: Any) -> None:
    runner = claude.beta.messages.tool_runner(messages=ASKED, tools=[get_weather], thinking=thinking, **MODEL)
    turns = list(runner)
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"]
    assert turns[-1].content[-1].to_dict()["text"] == WEATHER_TEXT


@pytest.mark.parametrize("streams", [False, True])
async def test_anthropics_async_tool_runner_goes_on_in_a_thread(url: str, streams: bool) -> None:
    """Its first request begins a thread, and its second one sends the result alone."""
    asked, statuses = list[Any](), list[int]()

    async def note(response: Any) -> None:
        asked.append(json.loads(response.request.content))
        statuses.append(response.status_code)

    async with anthropic.AsyncAnthropic(
        base_url=url.removesuffix("/v1"),
        api_key="none",
        max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(event_hooks={"response": [note]}),
    ) as client:
        runner = client.beta.messages.tool_runner(messages=ASKED, tools=[find_weather], stream=streams, **MODEL)
        answer = await runner.until_done()
    assert answer.content[-1].to_dict()["text"] == WEATHER_TEXT
    assert statuses == [200, 200]
    assert [body["thread"]["type"] for body in asked] == ["create", "continue"]
    assert ([block["type"] for block in asked[1]["messages"][0]["content"]], len(asked[1]["messages"])) == (
        ["tool_result"],
        1,
    )
    assert "tools" not in asked[1]


PROGRAM = """\
import asyncio
found = await asyncio.gather(*(look(number=number) for number in range(3)))
print(sum(found), await look(number=sum(found)))
"""
PROGRAMMING: Any = {
    "model": "agent",
    "max_tokens": 500,
    "messages": [{"role": "user", "content": f"run {json.dumps(PROGRAM)}\nsay {{result}}"}],
}
CODE: Any = {"type": "code_execution_20260120", "name": "code_execution"}


@anthropic.beta_tool(allowed_callers=["code_execution_20260120"])
def look(number: int) -> str:
    """Look a number up."""
    return str(7 * number)


@pytest.mark.parametrize("streams", [False, True])
def test_anthropics_tool_runner_runs_the_calls_of_programs(programming: str, streams: bool) -> None:
    with anthropic.Anthropic(base_url=programming, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(**PROGRAMMING, tools=[CODE, look], stream=streams)
        answer = runner.until_done()
    assert [block.text.strip() for block in answer.content if block.type == "text"] == ["21 147"]


def test_anthropic_goes_on_with_a_program_in_its_container(programming: str) -> None:
    """The loop of Anthropic's guide: the client sends all that it got, the results alone, and the container."""
    body, rounds = {**PROGRAMMING, "tools": [CODE, look.to_dict()]}, list[anthropic.types.Message]()
    with anthropic.Anthropic(base_url=programming, api_key="none", max_retries=0) as client:
        while not rounds or rounds[-1].stop_reason == "tool_use":
            message = client.messages.create(**body)
            rounds.append(message)
            calls = [block for block in message.content if block.type == "tool_use"]
            assert all(call.caller and call.caller.type == "code_execution_20260120" for call in calls)
            assert message.container
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": look(**call.input)}  # type: ignore[arg-type]
                for call in calls
            ]
            history = [message.to_param(), {"role": "user", "content": results}]
            body = {**body, "messages": [*body["messages"], *history], "container": message.container.id}
    assert [message.stop_reason for message in rounds] == ["tool_use", "tool_use", "end_turn"]
    (result,) = [block for block in rounds[-1].content if block.type == "code_execution_tool_result"]
    assert result.content.to_dict()["stdout"] == "21 147\n"


def test_anthropic_counts_tokens(claude: anthropic.Anthropic) -> None:
    count = claude.messages.count_tokens(model="tiny-gpt-oss", messages=HI).input_tokens
    assert count == read_by(claude.messages.create(messages=HI, **MODEL).usage)


def test_anthropic_gets_its_own_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(messages=ASKED, **MODEL | {"model": "unknown"})
    assert unknown.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        claude.messages.create(messages=[{"role": "user", "content": "word " * 20_000}], **MODEL)
