"""Anthropic's SDK: a text, a stream, calls and their results, the number of tokens, errors."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import anthropic
import pytest

HELLO = "Hello! How can I help you today?"
WEATHER_TEXT = "It is 18 °C in Paris right now."
HI: Any = [{"role": "user", "content": "Say hello."}]
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
MODEL: Any = {"model": "tiny-gpt-oss", "max_tokens": 500}


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


def test_anthropic_gets_a_text_and_thoughts(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(messages=HI, **MODEL)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert (answer.content[-1].to_dict()["text"], answer.stop_reason) == (HELLO, "end_turn")


def test_anthropic_gets_a_stream(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(messages=HI, **MODEL) as stream:
        assert "".join(stream.text_stream) == HELLO
        assert stream.get_final_message().usage.output_tokens > 5


@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "adaptive", "display": "omitted"}])
def test_anthropics_tool_runner_calls_a_function(claude: anthropic.Anthropic, thinking: Any) -> None:
    runner = claude.beta.messages.tool_runner(messages=ASKED, tools=[get_weather], thinking=thinking, **MODEL)
    turns = list(runner)
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"]
    assert turns[-1].content[-1].to_dict()["text"] == WEATHER_TEXT


def test_anthropic_counts_tokens(claude: anthropic.Anthropic) -> None:
    count = claude.messages.count_tokens(model="tiny-gpt-oss", messages=HI).input_tokens
    usage = claude.messages.create(messages=HI, **MODEL).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_anthropic_gets_its_own_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(messages=ASKED, **MODEL | {"model": "unknown"})
    assert unknown.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        claude.messages.create(messages=[{"role": "user", "content": "word " * 20_000}], **MODEL)
